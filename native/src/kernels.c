#include "kernels.h"

#include <stdlib.h>
#include <string.h>

static void horizontal(const ws_axis *axis, const uint8_t *const source[2], uint8_t *const target[2]) {
    for (int k = 0; k < 2; k++) {
        for (int32_t i = 0; i < axis->count; i++) {
            const uint8_t *pixel = source[k] + 4 * (int64_t)axis->start[i];
            const int32_t *taps = axis->taps + (int64_t)i * axis->stride;
            int32_t sum[3] = {1 << (WS_FRACTION - 1), 1 << (WS_FRACTION - 1), 1 << (WS_FRACTION - 1)};
            for (int32_t t = 0; t < axis->span[i]; t++, pixel += 4)
                for (int c = 0; c < 3; c++) sum[c] += taps[t] * pixel[c];
            for (int c = 0; c < 3; c++) target[k][3 * (int64_t)i + c] = ws_round(sum[c]);
        }
    }
}

static void vertical(const ws_axis *axis, int32_t row, const uint8_t *const *rows, int64_t bytes, uint8_t *target) {
    const int32_t *taps = axis->taps + (int64_t)row * axis->stride;
    for (int64_t i = 0; i < bytes; i++) {
        int32_t sum = 1 << (WS_FRACTION - 1);
        for (int32_t t = 0; t < axis->span[row]; t++) sum += taps[t] * rows[t][i];
        target[i] = ws_round(sum);
    }
}

static void widen(const uint8_t *source, int64_t pixels, uint8_t *target) {
    for (int64_t i = 0; i < pixels; i++) {
        memcpy(target + 4 * i, source + 3 * i, 3);
        target[4 * i + 3] = 0;
    }
}

const ws_kernels ws_scalar = {"scalar", horizontal, vertical, widen, ws_apply_scalar};

const ws_kernels *ws_choose(void) {
    const char *requested = getenv("WORLDSIZE_SIMD");
    if (requested && strcmp(requested, "scalar") == 0) return &ws_scalar;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return &ws_avx2;
#elif defined(__aarch64__)
    return &ws_neon;
#endif
    return &ws_scalar;
}
