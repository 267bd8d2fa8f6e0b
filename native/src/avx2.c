#if defined(__x86_64__)

#include "kernels.h"

#include <immintrin.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2")))

/* A product of 8 and 22 bits needs 32, and AVX2 is slow at 32-bit multiplication. Each tap is therefore split into two
   16-bit halves, which vpmaddwd (multiply pairs of 16 bits, add the two products) handles. The sums are joined as
   256 * high + low, which is exact. */

AVX2 static inline __m256i join(__m256i high, __m256i low) { return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low); }

AVX2 static inline __m256i pair_of_taps(const int16_t *taps) {
    int32_t both;
    memcpy(&both, taps, sizeof both);
    return _mm256_set1_epi32(both);
}

/* Shuffles of four 4-byte pixels: interleave the bytes of two neighbors, each extended to 16 bits. */
#define PIXELS_0_1 _mm256_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1, 0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1)
#define PIXELS_2_3 _mm256_setr_epi8(8, -1, 12, -1, 9, -1, 13, -1, 10, -1, 14, -1, 11, -1, 15, -1, 8, -1, 12, -1, 9, -1, 13, -1, 10, -1, 14, -1, 11, -1, 15, -1)
#define WITHOUT_FOURTH _mm256_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1, 0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1)

/* One pixel of both rows: the lower half of the result holds 4 sums of row a, the upper half those of row b. */
AVX2 static inline __m256i pixel(const uint8_t *a, const uint8_t *b, const int16_t *halves, int32_t groups) {
    __m256i high = _mm256_setzero_si256();
    __m256i low = _mm256_set1_epi32(1 << (WS_FRACTION - 1));
    for (int32_t g = 0; g < groups; g++, a += 4 * WS_GROUP, b += 4 * WS_GROUP, halves += 2 * WS_GROUP) {
        const __m256i four = _mm256_loadu2_m128i((const __m128i *)b, (const __m128i *)a);
        const __m256i p01 = _mm256_shuffle_epi8(four, PIXELS_0_1), p23 = _mm256_shuffle_epi8(four, PIXELS_2_3);
        const __m256i h01 = _mm256_madd_epi16(p01, pair_of_taps(halves)), h23 = _mm256_madd_epi16(p23, pair_of_taps(halves + 2));
        const __m256i l01 = _mm256_madd_epi16(p01, pair_of_taps(halves + 4)), l23 = _mm256_madd_epi16(p23, pair_of_taps(halves + 6));
        high = _mm256_add_epi32(high, _mm256_add_epi32(h01, h23));
        low = _mm256_add_epi32(low, _mm256_add_epi32(l01, l23));
    }
    return _mm256_srai_epi32(join(high, low), WS_FRACTION);
}

AVX2 static inline void four_pixels(const __m256i p[4], uint8_t *a, uint8_t *b) {
    const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(p[0], p[1]), _mm256_packs_epi32(p[2], p[3]));
    const __m256i rgb = _mm256_shuffle_epi8(bytes, WITHOUT_FOURTH);
    _mm_storeu_si128((__m128i *)a, _mm256_castsi256_si128(rgb));
    _mm_storeu_si128((__m128i *)b, _mm256_extracti128_si256(rgb, 1));
}

AVX2 static void horizontal(const ws_axis *axis, const uint8_t *const source[2], uint8_t *const target[2]) {
    const uint8_t *const a = source[0], *const b = source[1];
    const int32_t *const start = axis->start, *const span = axis->span;
    const int32_t count = axis->count, stride = axis->stride;
    uint8_t *to_a = target[0], *to_b = target[1];
    const int16_t *halves = axis->halves;
    for (int32_t i = 0; i < count; i += 4, to_a += 12, to_b += 12) {
        __m256i p[4];
        for (int32_t k = 0; k < 4; k++, halves += 2 * (int64_t)stride) {
            const int64_t from = 4 * (int64_t)start[i + k];
            /* Almost always there is one group; the constant 1 lets the compiler remove the loop. */
            const int32_t groups = stride == WS_GROUP ? 1 : (span[i + k] + WS_GROUP - 1) / WS_GROUP;
            p[k] = stride == WS_GROUP ? pixel(a + from, b + from, halves, 1) : pixel(a + from, b + from, halves, groups);
        }
        four_pixels(p, to_a, to_b);
    }
}

/* 32 columns. Rows are processed in pairs; an odd last row is paired with any other row and a tap of 0. */
AVX2 static inline __m256i column(const int16_t *halves, int32_t span, const uint8_t *const *rows, int64_t at) {
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (WS_FRACTION - 1));
    __m256i h0 = zero, h1 = zero, h2 = zero, h3 = zero, l0 = half, l1 = half, l2 = half, l3 = half;
    for (int32_t t = 0; t < span; t += 2) {
        const int16_t *taps = halves + t / WS_GROUP * (2 * WS_GROUP) + t % WS_GROUP;
        const __m256i high = pair_of_taps(taps), low = pair_of_taps(taps + WS_GROUP);
        const __m256i a = _mm256_loadu_si256((const __m256i *)(rows[t] + at));
        const __m256i b = _mm256_loadu_si256((const __m256i *)(rows[t + 1] + at));
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

AVX2 static void vertical(const ws_axis *axis, int32_t row, const uint8_t *const *rows, int64_t bytes, uint8_t *target) {
    const int16_t *const halves = axis->halves + 2 * (int64_t)row * axis->stride;
    const int32_t span = axis->span[row];
    int64_t at = 0;
    for (; at + 32 <= bytes; at += 32) _mm256_storeu_si256((__m256i *)(target + at), column(halves, span, rows, at));
    if (at < bytes) {
        uint8_t rest[32];
        _mm256_storeu_si256((__m256i *)rest, column(halves, span, rows, at));
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

const ws_kernels ws_avx2 = {"avx2", horizontal, vertical, widen, ws_apply_avx2};

#endif
