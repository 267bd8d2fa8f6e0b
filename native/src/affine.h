/* Affine maps with Pillow's pixels. Source: src/libImaging/Geometry.c of Pillow 13.0. For apply.h only. */
#ifndef WS_AFFINE_H
#define WS_AFFINE_H

#include <math.h>
#include <string.h>

#include "channels.h"
#include "worldsize.h"

static int32_t clip(int32_t v, int32_t size) { return v < 0 ? 0 : v < size ? v : size - 1; }

static int64_t fixed(double v) { return (int64_t)floor(v * 65536.0 + 0.5); }

/* The columns of an output row, first to last - 1, whose places are in the image. Places move evenly along a row, so these are
   one interval, and the loops over it need no checks. */
typedef struct {
    int32_t first, last;
} columns;

static int in_fixed(int64_t x, int64_t y, int32_t size) {
    const int64_t limit = (int64_t)size << 16;
    return x >= 0 && x < limit && y >= 0 && y < limit;
}

static columns inside_fixed(int64_t x, int64_t dx, int64_t y, int64_t dy, int32_t size) {
    columns c = {0, size};
    while (c.first < c.last && !in_fixed(x + c.first * dx, y + c.first * dy, size)) c.first++;
    while (c.first < c.last && !in_fixed(x + (c.last - 1) * dx, y + (c.last - 1) * dy, size)) c.last--;
    return c;
}

/* Fills the rest of the row. */
static void surround(columns c, const uint8_t fill[3], int32_t size, uint8_t *row) {
    for (int32_t x = 0; x < c.first; x++) memcpy(row + 3 * x, fill, 3);
    for (int32_t x = c.last; x < size; x++) memcpy(row + 3 * x, fill, 3);
}

/* Nearest neighbors in 16.16 fixed-point arithmetic. */
static void nearest(const double m[6], const uint8_t fill[3], int32_t size, const uint8_t *in, uint8_t *out) {
    const int64_t dx = fixed(m[0]), dy = fixed(m[3]), pitch = 3 * (int64_t)size;
    int64_t x0 = fixed(m[2] + m[0] * 0.5 + m[1] * 0.5), y0 = fixed(m[5] + m[3] * 0.5 + m[4] * 0.5);
    for (int32_t y = 0; y < size; y++, out += pitch, x0 += fixed(m[1]), y0 += fixed(m[4])) {
        const columns c = inside_fixed(x0, dx, y0, dy, size);
        int64_t xx = x0 + c.first * dx, yy = y0 + c.first * dy;
        surround(c, fill, size, out);
        for (int32_t x = c.first; x < c.last; x++, xx += dx, yy += dy) {
            memcpy(out + 3 * x, in + 4 * ((yy >> 16) * size + (xx >> 16)), 3);
        }
    }
}

/* The same in floating point, for maps that only scale and translate, as Pillow does. */
static void nearest_scaled(const double m[6], const uint8_t fill[3], int32_t size, const uint8_t *in, uint8_t *out) {
    const columns none = {size, size};
    columns c = none;
    double start = 0.0, xo = m[2] + m[0] * 0.5, yo = m[5] + m[4] * 0.5;
    for (int32_t x = 0; x < size; x++, xo += m[0]) {
        if (!(xo >= 0.0 && xo < size)) continue;
        if (c.first == size) c.first = x, start = xo;
        c.last = x + 1;
    }
    for (int32_t y = 0; y < size; y++, yo += m[4], out += 3 * (int64_t)size) {
        if (!(yo >= 0.0 && yo < size)) {
            surround(none, fill, size, out);
            continue;
        }
        const uint8_t *row = in + 4 * (int64_t)size * (int32_t)yo;
        surround(c, fill, size, out);
        xo = start;
        for (int32_t x = c.first; x < c.last; x++, xo += m[0]) memcpy(out + 3 * x, row + 4 * (int32_t)xo, 3);
    }
}

/* Where output column x of a row comes from. */
typedef struct {
    double x, y;
} place;

static place source(const double m[6], int32_t x, double yc) {
    const double xc = x + 0.5;
    return (place){m[0] * xc + m[1] * yc + m[2], m[3] * xc + m[4] * yc + m[5]};
}

static int32_t down(double v) {
    const int32_t i = (int32_t)v;
    return i - (v < i);
}

/* Shears and translations move pixels along one axis only: the distance d to a pixel along the other is 0, where the formulas
   below give exactly that pixel. */
static inline channels linear(const uint8_t *row, const int64_t places[2], double d) {
    const channels first = load(row + places[0]);
    return d == 0.0 ? first : first + (load(row + places[1]) - first) * d;
}

static inline channels bilinear(place p, int32_t size, const uint8_t *in) {
    const double left = p.x - 0.5, top = p.y - 0.5;
    const int32_t x = down(left), y = down(top);
    const double dx = left - x, dy = top - y;
    const int64_t pitch = 4 * (int64_t)size, places[2] = {4 * clip(x, size), 4 * clip(x + 1, size)};
    const channels first = linear(in + pitch * clip(y, size), places, dx);
    return dy == 0.0 ? first : first + (linear(in + pitch * clip(y + 1, size), places, dx) - first) * dy;
}

static inline channels cubic(const channels v[4], double d) {
    const channels p2 = -v[0] + v[2], p3 = 2 * (v[0] - v[1]) + v[2] - v[3], p4 = -v[0] + v[1] - v[2] + v[3];
    return v[1] + d * (p2 + d * (p3 + d * p4));
}

static inline channels cubic_line(const uint8_t *row, const int64_t places[4], double d) {
    const channels values[4] = {load(row + places[0]), load(row + places[1]), load(row + places[2]), load(row + places[3])};
    return cubic(values, d);
}

static inline channels bicubic(place p, int32_t size, const uint8_t *in) {
    const double left = p.x - 0.5, top = p.y - 0.5;
    const int32_t x = down(left), y = down(top);
    const double dx = left - x, dy = top - y;
    const int64_t pitch = 4 * (int64_t)size;
    const uint8_t *rows[4];
    int64_t places[4];
    channels lines[4];
    for (int i = 0; i < 4; i++) rows[i] = in + pitch * clip(y - 1 + i, size), places[i] = 4 * clip(x - 1 + i, size);
    if (dy == 0.0) return cubic_line(rows[1], places, dx);
    if (dx == 0.0) {
        for (int i = 0; i < 4; i++) lines[i] = load(rows[i] + places[1]);
    } else {
        for (int i = 0; i < 4; i++) lines[i] = cubic_line(rows[i], places, dx);
    }
    return cubic(lines, dy);
}

static int in_image(place p, int32_t size) { return p.x >= 0.0 && p.x < size && p.y >= 0.0 && p.y < size; }

static void interpolated(int interpolation, const double m[6], const uint8_t fill[3], int32_t size, const uint8_t *in, uint8_t *out) {
    for (int32_t y = 0; y < size; y++, out += 3 * (int64_t)size) {
        const double yc = y + 0.5;
        columns c = {0, size};
        while (c.first < c.last && !in_image(source(m, c.first, yc), size)) c.first++;
        while (c.first < c.last && !in_image(source(m, c.last - 1, yc), size)) c.last--;
        surround(c, fill, size, out);
        if (interpolation == WS_AFFINE_BILINEAR) {
            for (int32_t x = c.first; x < c.last; x++) store(bilinear(source(m, x, yc), size, in), out + 3 * x);
        } else {
            for (int32_t x = c.first; x < c.last; x++) store(bicubic(source(m, x, yc), size, in), out + 3 * x);
        }
    }
}

/* Resamples `in`, which has 4 bytes per pixel, into `out`, which has 3. Output pixel (x, y) is taken from
   (m[0] * x + m[1] * y + m[2], m[3] * x + m[4] * y + m[5]), both at pixel centers; it is `fill` outside the image.
   interpolation: one of the codes WS_AFFINE_*. */
static void affine(int interpolation, const double m[6], const uint8_t fill[3], int32_t size, const uint8_t *in, uint8_t *out) {
    if (interpolation != WS_AFFINE_NEAREST) {
        interpolated(interpolation, m, fill, size, in, out);
    } else if (m[1] == 0 && m[3] == 0) {
        nearest_scaled(m, fill, size, in, out);
    } else {
        nearest(m, fill, size, in, out);
    }
}

#endif
