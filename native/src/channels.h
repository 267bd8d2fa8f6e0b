/* The channels of a pixel, computed all at once; the fourth is not used. For affine.h only. */
#ifndef WS_CHANNELS_H
#define WS_CHANNELS_H

#include <stdint.h>
#include <string.h>

typedef double channels __attribute__((vector_size(32)));

#if defined(WS_AVX2)

static inline channels load(const uint8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return (channels)_mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four)));
}

/* Truncates, then clips. */
static inline void store(channels value, uint8_t *p) {
    const __m128i whole = _mm256_cvttpd_epi32((__m256d)value), words = _mm_packs_epi32(whole, whole);
    const int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
    memcpy(p, &four, 3);
}

#else

typedef int32_t integers __attribute__((vector_size(16)));
typedef uint8_t bytes __attribute__((vector_size(4)));

static inline channels load(const uint8_t *p) {
    bytes four;
    memcpy(&four, p, 4);
    return __builtin_convertvector(__builtin_convertvector(four, integers), channels);
}

/* Truncates, then clips. */
static inline void store(channels value, uint8_t *p) {
    for (int c = 0; c < 3; c++) {
        const int32_t whole = (int32_t)value[c];
        p[c] = (uint8_t)(whole < 0 ? 0 : whole > 255 ? 255 : whole);
    }
}

#endif
#endif
