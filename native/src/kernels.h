/* The inner loops, one version per CPU type. All versions give the same bytes. */
#ifndef WS_KERNELS_H
#define WS_KERNELS_H

#include "axis.h"
#include "worldsize.h"

/* Bytes that must be readable (in outputs: writable) after the last byte of every row passed to a kernel. */
#define WS_SLACK 64
/* Rows around an image from which a blur with WS_MAX_BLUR takes pixels, above and below it. */
#define WS_BLUR_ROWS 4

/* The sum of WS_MIX_BEGIN and the following operations, and the image that they begin with: 3 values per pixel each. */
typedef struct {
    float *sum;
    uint8_t *kept;
} ws_mix;

typedef struct {
    const char *name;
    /* Resizes two rows of 4-byte pixels at once, each to axis->count pixels of 3 bytes. */
    void (*horizontal)(const ws_axis *axis, const uint8_t *const source[2], uint8_t *const target[2]);
    /* Computes output `row` of axis from rows[0] .. rows[span - 1], each of `bytes` bytes. rows[span] must be readable, too.
       target needs no slack. */
    void (*vertical)(const ws_axis *axis, int32_t row, const uint8_t *const *rows, int64_t bytes, uint8_t *target);
    /* Converts 3-byte pixels to 4-byte pixels; the fourth byte is undefined. source needs no slack. */
    void (*widen)(const uint8_t *source, int64_t pixels, uint8_t *target);
    /* Applies one operation, which must be valid, to an image in place; fill as in ws_augment. copy: space for 4 bytes
       per pixel, WS_BLUR_ROWS rows of 3-byte pixels, and slack. mix: used by WS_MIX_* only. */
    void (*apply)(const ws_operation *operation, const uint8_t fill[3], int32_t size, uint8_t *copy, const ws_mix *mix,
                  uint8_t *image);
} ws_kernels;

void ws_apply_scalar(const ws_operation *operation, const uint8_t fill[3], int32_t size, uint8_t *copy, const ws_mix *mix,
                     uint8_t *image);
void ws_apply_avx2(const ws_operation *operation, const uint8_t fill[3], int32_t size, uint8_t *copy, const ws_mix *mix,
                   uint8_t *image);

extern const ws_kernels ws_scalar;
#if defined(__x86_64__)
extern const ws_kernels ws_avx2;
#elif defined(__aarch64__)
extern const ws_kernels ws_neon;
#endif

/* The fastest kernels for this CPU; WORLDSIZE_SIMD=scalar in the environment selects plain C. */
const ws_kernels *ws_choose(void);

static inline uint8_t ws_round(int32_t sum) {
    sum >>= WS_FRACTION;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

#endif
