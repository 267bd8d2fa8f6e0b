/* Affine maps with Pillow's pixels. Source: src/libImaging/Geometry.c of Pillow 13.0. For apply.h only. */
#ifndef WS_AFFINE_H
#define WS_AFFINE_H

#include <math.h>
#include <string.h>

#include "worldsize.h"

static int32_t clip(int32_t v, int32_t size) { return v < 0 ? 0 : v < size ? v : size - 1; }

static int64_t fixed(double v) { return (int64_t)floor(v * 65536.0 + 0.5); }

/* Nearest neighbors in 16.16 fixed-point arithmetic. */
static void nearest(const double m[6], int32_t size, const uint8_t *in, uint8_t *out) {
    const int64_t dx = fixed(m[0]), dy = fixed(m[3]);
    int64_t x0 = fixed(m[2] + m[0] * 0.5 + m[1] * 0.5), y0 = fixed(m[5] + m[3] * 0.5 + m[4] * 0.5);
    for (int32_t y = 0; y < size; y++, x0 += fixed(m[1]), y0 += fixed(m[4])) {
        int64_t xx = x0, yy = y0;
        for (int32_t x = 0; x < size; x++, out += 3, xx += dx, yy += dy) {
            const int64_t column = xx >> 16, row = yy >> 16;
            if (column >= 0 && column < size && row >= 0 && row < size) memcpy(out, in + 4 * (row * size + column), 3);
        }
    }
}

/* The same in floating point, for maps that only scale and translate, as Pillow does. */
static void nearest_scaled(const double m[6], int32_t size, const uint8_t *in, uint8_t *out) {
    double yo = m[5] + m[4] * 0.5;
    for (int32_t y = 0; y < size; y++, yo += m[4]) {
        double xo = m[2] + m[0] * 0.5;
        if (!(yo >= 0.0 && yo < size)) {
            out += 3 * (int64_t)size;
            continue;
        }
        const uint8_t *row = in + 4 * (int64_t)size * (int32_t)yo;
        for (int32_t x = 0; x < size; x++, out += 3, xo += m[0]) {
            if (xo >= 0.0 && xo < size) memcpy(out, row + 4 * (int32_t)xo, 3);
        }
    }
}

/* The channels of a pixel. All are computed at once; the fourth is not used. */
typedef double channels __attribute__((vector_size(32)));
typedef int32_t integers __attribute__((vector_size(16)));
typedef uint8_t bytes __attribute__((vector_size(4)));

static channels load(const uint8_t *p) {
    bytes four;
    memcpy(&four, p, 4);
    return __builtin_convertvector(__builtin_convertvector(four, integers), channels);
}

static channels between(channels a, channels b, double d) { return a + (b - a) * d; }

static void bilinear_pixel(double xin, double yin, int32_t size, const uint8_t *in, uint8_t *out) {
    const int32_t x = (int32_t)floor(xin), y = (int32_t)floor(yin);
    const double dx = xin - x, dy = yin - y;
    const int64_t left = 4 * clip(x, size), right = 4 * clip(x + 1, size), pitch = 4 * (int64_t)size;
    const uint8_t *upper = in + pitch * clip(y, size);
    const uint8_t *lower = y + 1 < size ? in + pitch * (y + 1) : upper;
    const channels first = between(load(upper + left), load(upper + right), dx);
    const channels second = between(load(lower + left), load(lower + right), dx);
    const channels value = between(first, second, dy);
    for (int c = 0; c < 3; c++) out[c] = (uint8_t)value[c];
}

static channels cubic(const channels v[4], double d) {
    const channels p2 = -v[0] + v[2], p3 = 2 * (v[0] - v[1]) + v[2] - v[3], p4 = -v[0] + v[1] - v[2] + v[3];
    return v[1] + d * (p2 + d * (p3 + d * p4));
}

static void bicubic_pixel(double xin, double yin, int32_t size, const uint8_t *in, uint8_t *out) {
    const int32_t x = (int32_t)floor(xin), y = (int32_t)floor(yin);
    const double dx = xin - x, dy = yin - y;
    int64_t columns[4];
    channels lines[4];
    for (int i = 0; i < 4; i++) columns[i] = 4 * clip(x - 1 + i, size);
    for (int i = 0; i < 4; i++) {
        const uint8_t *row = in + 4 * (int64_t)size * clip(y - 1 + i, size);
        const channels values[4] = {load(row + columns[0]), load(row + columns[1]), load(row + columns[2]),
                                    load(row + columns[3])};
        lines[i] = cubic(values, dx);
    }
    const channels value = cubic(lines, dy);
    for (int c = 0; c < 3; c++) out[c] = value[c] <= 0.0 ? 0 : value[c] >= 255.0 ? 255 : (uint8_t)value[c];
}

static void interpolated(int interpolation, const double m[6], int32_t size, const uint8_t *in, uint8_t *out) {
    for (int32_t y = 0; y < size; y++) {
        const double yc = y + 0.5;
        for (int32_t x = 0; x < size; x++, out += 3) {
            const double xc = x + 0.5;
            const double xin = m[0] * xc + m[1] * yc + m[2], yin = m[3] * xc + m[4] * yc + m[5];
            if (!(xin >= 0.0 && xin < size && yin >= 0.0 && yin < size)) continue;
            if (interpolation == WS_AFFINE_BILINEAR) {
                bilinear_pixel(xin - 0.5, yin - 0.5, size, in, out);
            } else {
                bicubic_pixel(xin - 0.5, yin - 0.5, size, in, out);
            }
        }
    }
}

/* Resamples `in`, which has 4 bytes per pixel, into `out`, which has 3. Output pixel (x, y) is taken from (m[0] * x + m[1] * y + m[2], m[3] * x + m[4] * y + m[5]), both
   at pixel centers; it is `fill` outside the image. interpolation: one of the codes WS_AFFINE_*. */
static void affine(int interpolation, const double m[6], const uint8_t fill[3], int32_t size, const uint8_t *in, uint8_t *out) {
    for (int64_t i = 0; i < (int64_t)size * size; i++) memcpy(out + 3 * i, fill, 3);
    if (interpolation != WS_AFFINE_NEAREST) {
        interpolated(interpolation, m, size, in, out);
    } else if (m[1] == 0 && m[3] == 0) {
        nearest_scaled(m, size, in, out);
    } else {
        nearest(m, size, in, out);
    }
}

#endif
