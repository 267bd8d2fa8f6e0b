/* The inner loops, in one version for each kind of processor. All versions give the same bytes. */
#ifndef WS_KERNELS_H
#define WS_KERNELS_H

#include "axis.h"

/* Bytes that must be readable, and in outputs writable, after the last byte of any row given to a kernel. */
#define WS_SLACK 64

typedef struct {
    const char *name;
    /* Two rows of 4-byte pixels at once, each to axis->count pixels of 3 bytes. */
    void (*across)(const ws_axis *axis, const uint8_t *const source[2], uint8_t *const target[2]);
    /* Output `row` of axis from rows[0] .. rows[span - 1], each of `bytes` bytes; rows[span] must be readable, too.
       target has no slack. */
    void (*down)(const ws_axis *axis, int32_t row, const uint8_t *const *rows, int64_t bytes, uint8_t *target);
    /* 3-byte pixels to 4-byte pixels; the fourth byte is anything. source has no slack. */
    void (*widen)(const uint8_t *source, int64_t pixels, uint8_t *target);
} ws_kernels;

extern const ws_kernels ws_scalar;
#if defined(__x86_64__)
extern const ws_kernels ws_avx2;
#elif defined(__aarch64__)
extern const ws_kernels ws_neon;
#endif

/* The fastest that this processor has; WORLDSIZE_SIMD=scalar in the environment asks for plain C. */
const ws_kernels *ws_choose(void);

static inline uint8_t ws_round(int32_t sum) {
    sum >>= WS_FRACTION;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

#endif
