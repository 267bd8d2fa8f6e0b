/* Operations on colors with Pillow's pixels, in place. Sources: src/libImaging/{Blend,Convert,Filter}.c and
   src/PIL/{ImageEnhance,ImageOps}.py of Pillow 13.0. For apply.h only. */
#ifndef WS_TONE_H
#define WS_TONE_H

#include <math.h>
#include <string.h>

#include "worldsize.h"

enum { LEVELS = 256 };

static uint8_t luma(const uint8_t *p) { return (uint8_t)((p[0] * 19595 + p[1] * 38470 + p[2] * 7471 + 0x8000) >> 16); }

/* Truncates, then clips: compilers vectorize comparisons of integers. |v| must be below 2^31. */
static uint8_t clipped(float v) {
    const int i = (int)v;
    return (uint8_t)(i < 0 ? 0 : i > 255 ? 255 : i);
}

/* ImagingBlend: from `degenerate` (factor 0) through `value` (factor 1) and beyond. */
static uint8_t blend(uint8_t degenerate, uint8_t value, float factor) {
    return clipped((float)degenerate + factor * (float)(value - degenerate));
}

/* The blends with one constant, as a table. */
static void blend_with(uint8_t constant, double factor, int64_t pixels, uint8_t *image) {
    uint8_t table[LEVELS];
    for (int v = 0; v < LEVELS; v++) table[v] = blend(constant, (uint8_t)v, (float)factor);
    for (int64_t i = 0; i < 3 * pixels; i++) image[i] = table[image[i]];
}

static void brightness(double factor, int64_t pixels, uint8_t *image) { blend_with(0, factor, pixels, image); }

static void contrast(double factor, int64_t pixels, uint8_t *image) {
    int64_t sum = 0;
    for (int64_t i = 0; i < pixels; i++) sum += luma(image + 3 * i);
    blend_with((uint8_t)((double)sum / (double)pixels + 0.5), factor, pixels, image);
}

static void color(double factor, int64_t pixels, uint8_t *image) {
    for (uint8_t *p = image; p < image + 3 * pixels; p += 3) {
        const uint8_t gray = luma(p);
        for (int c = 0; c < 3; c++) p[c] = blend(gray, p[c], (float)factor);
    }
}

/* ImageFilter.SMOOTH of one channel of one pixel, from the row below to the row above. */
static uint8_t smooth(const uint8_t *p, int64_t pitch) {
    const float rim = 1.0f / 13.0f, center = 5.0f / 13.0f;
    const uint8_t *below = p + pitch, *above = p - pitch;
    float sum = 0.5f;
    sum += (float)below[-3] * rim + (float)below[0] * rim + (float)below[3] * rim;
    sum += (float)p[-3] * rim + (float)p[0] * center + (float)p[3] * rim;
    sum += (float)above[-3] * rim + (float)above[0] * rim + (float)above[3] * rim;
    return (uint8_t)(int)sum;
}

/* `copy` has the same pixels as the image. */
static void sharpness(double factor, int32_t size, const uint8_t *restrict copy, uint8_t *restrict image) {
    const int64_t pitch = 3 * (int64_t)size;
    /* At the border the smooth image equals the image, and so does every blend. */
    const float f = (float)factor;
    for (int32_t y = 1; y < size - 1; y++) {
        for (int64_t i = y * pitch + 3; i < (y + 1) * pitch - 3; i++) image[i] = blend(smooth(copy + i, pitch), copy[i], f);
    }
}

static void look_up(const uint8_t table[LEVELS], int64_t values, uint8_t *image) {
    for (int64_t i = 0; i < values; i++) image[i] = table[image[i]];
}

static void posterize(int bits, int64_t pixels, uint8_t *image) {
    const uint8_t mask = (uint8_t)(0xff << (8 - bits));
    for (int64_t i = 0; i < 3 * pixels; i++) image[i] &= mask;
}

static void solarize(double threshold, int64_t pixels, uint8_t *image) {
    uint8_t table[LEVELS];
    for (int v = 0; v < LEVELS; v++) table[v] = (uint8_t)(v < threshold ? v : 255 - v);
    look_up(table, 3 * pixels, image);
}

static void solarize_add(int added, double threshold, int64_t pixels, uint8_t *image) {
    uint8_t table[LEVELS];
    for (int v = 0; v < LEVELS; v++) table[v] = (uint8_t)(v >= threshold ? v : v + added > 255 ? 255 : v + added);
    look_up(table, 3 * pixels, image);
}

static void histograms(int64_t pixels, const uint8_t *image, int64_t counts[3][LEVELS]) {
    memset(counts, 0, sizeof(int64_t[3][LEVELS]));
    for (const uint8_t *p = image; p < image + 3 * pixels; p += 3) {
        for (int c = 0; c < 3; c++) counts[c][p[c]]++;
    }
}

static void look_up_channels(uint8_t tables[3][LEVELS], int64_t pixels, uint8_t *image) {
    for (uint8_t *p = image; p < image + 3 * pixels; p += 3) {
        for (int c = 0; c < 3; c++) p[c] = tables[c][p[c]];
    }
}

static uint8_t level(double v) { return v < 0 ? 0 : v > 255 ? 255 : (uint8_t)v; }

/* The table that stretches the levels in use to 0..255. */
static void stretched(const int64_t counts[LEVELS], uint8_t table[LEVELS]) {
    int low = 0, high = LEVELS - 1;
    while (low < LEVELS - 1 && !counts[low]) low++;
    while (high > 0 && !counts[high]) high--;
    const double scale = high > low ? 255.0 / (high - low) : 1.0, offset = high > low ? -low * scale : 0.0;
    for (int v = 0; v < LEVELS; v++) table[v] = level(v * scale + offset);
}

static void autocontrast(int64_t pixels, uint8_t *image) {
    int64_t counts[3][LEVELS];
    uint8_t tables[3][LEVELS];
    histograms(pixels, image, counts);
    for (int c = 0; c < 3; c++) stretched(counts[c], tables[c]);
    look_up_channels(tables, pixels, image);
}

/* The table that makes the histogram flat. Unchanged if the step is 0, as for an image with one level. */
static void equalized(const int64_t counts[LEVELS], int64_t pixels, uint8_t table[LEVELS]) {
    int last = LEVELS - 1;
    while (last > 0 && !counts[last]) last--;
    const int64_t step = (pixels - counts[last]) / 255;
    int64_t n = step / 2;
    for (int v = 0; v < LEVELS; n += counts[v++]) {
        const int64_t value = step ? n / step : v;
        table[v] = (uint8_t)(value > 255 ? 255 : value);
    }
}

static void equalize(int64_t pixels, uint8_t *image) {
    int64_t counts[3][LEVELS];
    uint8_t tables[3][LEVELS];
    histograms(pixels, image, counts);
    for (int c = 0; c < 3; c++) equalized(counts[c], pixels, tables[c]);
    look_up_channels(tables, pixels, image);
}

static int largest(const uint8_t *p) {
    const int m = p[0] > p[1] ? p[0] : p[1];
    return m > p[2] ? m : p[2];
}

static int smallest(const uint8_t *p) {
    const int m = p[0] < p[1] ? p[0] : p[1];
    return m < p[2] ? m : p[2];
}

static uint8_t hue_of(const uint8_t *p, int maximum, float range) {
    const float r = (float)(maximum - p[0]) / range, g = (float)(maximum - p[1]) / range, b = (float)(maximum - p[2]) / range;
    float h;
    if (p[0] == maximum) {
        h = b - g;
    } else if (p[1] == maximum) {
        h = (float)(2.0 + r - b);
    } else {
        h = (float)(4.0 + g - r);
    }
    h = (float)fmod(h / 6.0 + 1.0, 1.0);
    return (uint8_t)(int)(h * 255.0);
}

static void shift_hue(int shift, uint8_t *p) {
    const int v = largest(p), minimum = smallest(p);
    if (v == minimum) return;
    const float range = (float)(v - minimum);
    const uint8_t s = (uint8_t)(int)(range / (float)v * 255.0);
    const uint8_t h = (uint8_t)(hue_of(p, v, range) + shift);
    const int i = (int)floor((float)h * 6.0 / 255.0);
    const float f = (float)((float)h * 6.0 / 255.0 - (float)i), fs = (float)((float)s / 255.0);
    const uint8_t low = (uint8_t)round((float)v * (1.0 - fs)), falling = (uint8_t)round((float)v * (1.0 - fs * f)),
                  rising = (uint8_t)round((float)v * (1.0 - fs * (1.0 - f))), high = (uint8_t)v;
    const uint8_t colors[6][3] = {{high, rising, low}, {falling, high, low}, {low, high, rising},
                                  {low, falling, high}, {rising, low, high}, {high, low, falling}};
    if (s == 0) {
        memset(p, v, 3);
    } else {
        memcpy(p, colors[i % 6], 3);
    }
}

static void shift(const double added[3], int64_t pixels, uint8_t *image) {
    uint8_t tables[3][LEVELS];
    for (int c = 0; c < 3; c++) {
        for (int v = 0; v < LEVELS; v++) tables[c][v] = level(v + added[c]);
    }
    look_up_channels(tables, pixels, image);
}

/* Adds `shift` to the hue of Pillow's HSV mode, modulo 256. */
static void hue(int shift, int64_t pixels, uint8_t *image) {
    for (uint8_t *p = image; p < image + 3 * pixels; p += 3) shift_hue(shift, p);
}

#endif
