#if defined(__x86_64__)

#include "kernels.h"

#include <immintrin.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2")))

/* Products of 8 and 22 bits need 32, which AVX2 multiplies slowly. So each tap comes in two halves of 16 bits, and the
   instruction that multiplies pairs of 16 bits and adds the two products does both halves; the sums are put together as
   256 * high + low, which is exact. */

AVX2 static inline __m256i join(__m256i high, __m256i low) { return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low); }

AVX2 static inline __m256i pair_of_taps(const int16_t *taps) {
    int32_t both;
    memcpy(&both, taps, sizeof both);
    return _mm256_set1_epi32(both);
}

/* One pixel of both rows: the lower half of the result is 4 sums of row 0, the upper half of row 1. */
AVX2 static inline __m256i pixel(const ws_axis *axis, int32_t i, const uint8_t *const source[2], __m256i first, __m256i second) {
    const int64_t from = 4 * (int64_t)axis->start[i];
    const int16_t *high_taps = axis->high + (int64_t)i * axis->stride;
    const int16_t *low_taps = axis->low + (int64_t)i * axis->stride;
    __m256i high = _mm256_setzero_si256();
    __m256i low = _mm256_set1_epi32(1 << (WS_FRACTION - 1));
    for (int32_t t = 0; t < axis->span[i]; t += WS_GROUP) {
        const __m128i a = _mm_loadu_si128((const __m128i *)(source[0] + from + 4 * (int64_t)t));
        const __m128i b = _mm_loadu_si128((const __m128i *)(source[1] + from + 4 * (int64_t)t));
        const __m256i four = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
        const __m256i p01 = _mm256_shuffle_epi8(four, first), p23 = _mm256_shuffle_epi8(four, second);
        high = _mm256_add_epi32(high, _mm256_madd_epi16(p01, pair_of_taps(high_taps + t)));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(p01, pair_of_taps(low_taps + t)));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(p23, pair_of_taps(high_taps + t + 2)));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(p23, pair_of_taps(low_taps + t + 2)));
    }
    return _mm256_srai_epi32(join(high, low), WS_FRACTION);
}

AVX2 static void across(const ws_axis *axis, const uint8_t *const source[2], uint8_t *const target[2]) {
    /* Of four pixels of 4 bytes: two neighbours' bytes side by side, each as 16 bits. */
    const __m256i first = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
    const __m256i second = _mm256_add_epi8(first, _mm256_broadcastsi128_si256(_mm_set1_epi16(8)));
    const __m256i without_fourth = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    for (int32_t i = 0; i < axis->count; i += WS_GROUP) {
        const __m256i p0 = pixel(axis, i, source, first, second), p1 = pixel(axis, i + 1, source, first, second);
        const __m256i p2 = pixel(axis, i + 2, source, first, second), p3 = pixel(axis, i + 3, source, first, second);
        const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(p0, p1), _mm256_packs_epi32(p2, p3));
        const __m256i rgb = _mm256_shuffle_epi8(bytes, without_fourth);
        _mm_storeu_si128((__m128i *)(target[0] + 3 * (int64_t)i), _mm256_castsi256_si128(rgb));
        _mm_storeu_si128((__m128i *)(target[1] + 3 * (int64_t)i), _mm256_extracti128_si256(rgb, 1));
    }
}

/* 32 columns. Rows are taken in pairs; a last odd one is paired with itself and a tap of 0. */
AVX2 static __m256i column(const ws_axis *axis, int32_t row, const uint8_t *const *rows, int64_t at) {
    const int16_t *high_taps = axis->high + (int64_t)row * axis->stride;
    const int16_t *low_taps = axis->low + (int64_t)row * axis->stride;
    const int32_t span = axis->span[row];
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (WS_FRACTION - 1));
    __m256i h0 = zero, h1 = zero, h2 = zero, h3 = zero, l0 = half, l1 = half, l2 = half, l3 = half;
    for (int32_t t = 0; t < span; t += 2) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)(rows[t] + at));
        const __m256i b = _mm256_loadu_si256((const __m256i *)(rows[t + 1 < span ? t + 1 : t] + at));
        const __m256i high = pair_of_taps(high_taps + t), low = pair_of_taps(low_taps + t);
        const __m256i left = _mm256_unpacklo_epi8(a, b), right = _mm256_unpackhi_epi8(a, b);
        const __m256i p0 = _mm256_unpacklo_epi8(left, zero), p1 = _mm256_unpackhi_epi8(left, zero);
        const __m256i p2 = _mm256_unpacklo_epi8(right, zero), p3 = _mm256_unpackhi_epi8(right, zero);
        h0 = _mm256_add_epi32(h0, _mm256_madd_epi16(p0, high));
        h1 = _mm256_add_epi32(h1, _mm256_madd_epi16(p1, high));
        h2 = _mm256_add_epi32(h2, _mm256_madd_epi16(p2, high));
        h3 = _mm256_add_epi32(h3, _mm256_madd_epi16(p3, high));
        l0 = _mm256_add_epi32(l0, _mm256_madd_epi16(p0, low));
        l1 = _mm256_add_epi32(l1, _mm256_madd_epi16(p1, low));
        l2 = _mm256_add_epi32(l2, _mm256_madd_epi16(p2, low));
        l3 = _mm256_add_epi32(l3, _mm256_madd_epi16(p3, low));
    }
    const __m256i s0 = _mm256_srai_epi32(join(h0, l0), WS_FRACTION), s1 = _mm256_srai_epi32(join(h1, l1), WS_FRACTION);
    const __m256i s2 = _mm256_srai_epi32(join(h2, l2), WS_FRACTION), s3 = _mm256_srai_epi32(join(h3, l3), WS_FRACTION);
    return _mm256_packus_epi16(_mm256_packs_epi32(s0, s1), _mm256_packs_epi32(s2, s3));
}

AVX2 static void down(const ws_axis *axis, int32_t row, const uint8_t *const *rows, int64_t bytes, uint8_t *target) {
    int64_t at = 0;
    for (; at + 32 <= bytes; at += 32) _mm256_storeu_si256((__m256i *)(target + at), column(axis, row, rows, at));
    if (at < bytes) {
        uint8_t rest[32];
        _mm256_storeu_si256((__m256i *)rest, column(axis, row, rows, at));
        memcpy(target + at, rest, (size_t)(bytes - at));
    }
}

AVX2 static void widen(const uint8_t *source, int64_t pixels, uint8_t *target) {
    const __m128i spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    int64_t i = 0;
    for (; 3 * i + 16 <= 3 * pixels; i += 4)
        _mm_storeu_si128((__m128i *)(target + 4 * i), _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(source + 3 * i)), spread));
    ws_scalar.widen(source + 3 * i, pixels - i, target + 4 * i);
}

const ws_kernels ws_avx2 = {"avx2", across, down, widen};

#endif
