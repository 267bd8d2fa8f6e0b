#if defined(__aarch64__)

#include "kernels.h"

#include <arm_neon.h>
#include <string.h>

static inline int32x4_t wide_low(uint8x16_t bytes) {
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vget_low_u8(bytes)))));
}

static inline int32x4_t wide_high(uint8x16_t bytes) {
    return vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(vmovl_u8(vget_low_u8(bytes)))));
}

static inline int16x4_t narrow(int32x4_t sum) { return vqmovn_s32(vshrq_n_s32(sum, WS_FRACTION)); }

static void horizontal(const ws_axis *axis, const uint8_t *const source[2], uint8_t *const target[2]) {
    for (int k = 0; k < 2; k++) {
        for (int32_t i = 0; i < axis->count; i++) {
            const uint8_t *pixel = source[k] + 4 * (int64_t)axis->start[i];
            const int32_t *taps = axis->taps + (int64_t)i * axis->stride;
            int32x4_t sum = vdupq_n_s32(1 << (WS_FRACTION - 1));
            for (int32_t t = 0; t < axis->span[i]; t += WS_GROUP, pixel += 4 * WS_GROUP) {
                const uint8x16_t four = vld1q_u8(pixel), last = vextq_u8(four, four, 8);
                sum = vmlaq_n_s32(sum, wide_low(four), taps[t]);
                sum = vmlaq_n_s32(sum, wide_high(four), taps[t + 1]);
                sum = vmlaq_n_s32(sum, wide_low(last), taps[t + 2]);
                sum = vmlaq_n_s32(sum, wide_high(last), taps[t + 3]);
            }
            const uint8x8_t bytes = vqmovun_s16(vcombine_s16(narrow(sum), narrow(sum)));
            const uint32_t rgb = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
            memcpy(target[k] + 3 * (int64_t)i, &rgb, sizeof rgb);
        }
    }
}

static uint8x16_t column(const int32_t *taps, int32_t span, const uint8_t *const *rows, int64_t at) {
    int32x4_t s0 = vdupq_n_s32(1 << (WS_FRACTION - 1)), s1 = s0, s2 = s0, s3 = s0;
    for (int32_t t = 0; t < span; t++) {
        const uint8x16_t bytes = vld1q_u8(rows[t] + at), last = vextq_u8(bytes, bytes, 8);
        s0 = vmlaq_n_s32(s0, wide_low(bytes), taps[t]);
        s1 = vmlaq_n_s32(s1, wide_high(bytes), taps[t]);
        s2 = vmlaq_n_s32(s2, wide_low(last), taps[t]);
        s3 = vmlaq_n_s32(s3, wide_high(last), taps[t]);
    }
    const uint8x8_t low = vqmovun_s16(vcombine_s16(narrow(s0), narrow(s1)));
    return vcombine_u8(low, vqmovun_s16(vcombine_s16(narrow(s2), narrow(s3))));
}

static void vertical(const ws_axis *axis, int32_t row, const uint8_t *const *rows, int64_t bytes, uint8_t *target) {
    const int32_t *const taps = axis->taps + (int64_t)row * axis->stride;
    int64_t at = 0;
    for (; at + 16 <= bytes; at += 16) vst1q_u8(target + at, column(taps, axis->span[row], rows, at));
    if (at < bytes) {
        uint8_t rest[16];
        vst1q_u8(rest, column(taps, axis->span[row], rows, at));
        memcpy(target + at, rest, (size_t)(bytes - at));
    }
}

static void widen(const uint8_t *source, int64_t pixels, uint8_t *target) {
    int64_t i = 0;
    for (; i + 16 <= pixels; i += 16) {
        const uint8x16x3_t rgb = vld3q_u8(source + 3 * i);
        const uint8x16x4_t four = {{rgb.val[0], rgb.val[1], rgb.val[2], vdupq_n_u8(0)}};
        vst4q_u8(target + 4 * i, four);
    }
    ws_scalar.widen(source + 3 * i, pixels - i, target + 4 * i);
}

const ws_kernels ws_neon = {"neon", horizontal, vertical, widen, ws_apply_scalar};

#endif
