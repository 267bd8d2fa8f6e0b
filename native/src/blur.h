/* Gaussian blur as three box blurs in each direction. For apply.h only. */
#ifndef WS_BLUR_H
#define WS_BLUR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

/* Weights in units of 2^-24: of each of the 2 * radius + 1 pixels of a box, and of each of the two beside it. */
typedef struct {
    int32_t radius;
    uint32_t inside, beside;
} box;

/* The box that, applied three times, has this standard deviation in pixels: Gwosdek et al. 2011, "Theoretical foundations of
   Gaussian convolution by extended box filtering", equations 7, 11 and 14. In single precision, as in Pillow. */
static box box_of(float sigma) {
    const float variance = sigma * sigma / 3;
    const float length = (float)sqrt(12.0 * variance + 1.0);
    const float whole = (float)floor((length - 1.0) / 2.0);
    const float excess = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance);
    const float radius = whole + excess / (6 * (variance - (whole + 1) * (whole + 1)));
    const uint32_t one = 1u << 24, inside = (uint32_t)((float)one / (radius * 2 + 1));
    const int32_t inner = (int32_t)radius;
    return (box){inner, inside, (one - (uint32_t)(inner * 2 + 1) * inside) / 2};
}

/* out[i] is the box around from[i], whose neighbors are `step` bytes apart. */
static inline __attribute__((always_inline)) void weigh(const uint8_t *restrict from, int64_t count, int64_t step, box b,
                                                        int32_t radius, uint8_t *restrict out) {
    const int64_t far = (radius + 1) * step;
    for (int64_t i = 0; i < count; i++) {
        uint32_t sum = from[i];
        for (int32_t k = 1; k <= radius; k++) sum += (uint32_t)from[i - k * step] + from[i + k * step];
        const uint32_t value = sum * b.inside + ((uint32_t)from[i - far] + from[i + far]) * b.beside;
        out[i] = (uint8_t)((value + (1u << 23)) >> 24);
    }
}

/* The radius is at most 1 for WS_MAX_BLUR, and a constant here, with which the compiler vectorizes the sum. */
static void blur_line(const uint8_t *from, int64_t count, int64_t step, box b, uint8_t *out) {
    if (b.radius == 0) {
        weigh(from, count, step, b, 0, out);
    } else {
        weigh(from, count, step, b, 1, out);
    }
}

/* space: WS_BLUR_ROWS rows more than the image. The first and the last pixel continue outside of it. */
static void blur(double sigma, int32_t size, uint8_t *space, uint8_t *image) {
    const box b = box_of((float)sigma);
    const int64_t row = 3 * (int64_t)size;
    const int32_t margin = b.radius + 1;
    for (int32_t y = 0; y < size; y++) {
        uint8_t *const line = image + y * row, *const inner = space + 3 * margin;
        for (int pass = 0; pass < 3; pass++) {
            memcpy(inner, line, (size_t)row);
            for (int32_t x = 0; x < margin; x++) {
                memcpy(space + 3 * x, line, 3);
                memcpy(inner + row + 3 * x, line + row - 3, 3);
            }
            blur_line(inner, row, 3, b, line);
        }
    }
    uint8_t *const inner = space + margin * row;
    for (int pass = 0; pass < 3; pass++) {
        memcpy(inner, image, (size_t)(size * row));
        for (int32_t y = 0; y < margin; y++) {
            memcpy(space + y * row, image, (size_t)row);
            memcpy(inner + (size + y) * row, image + (size - 1) * row, (size_t)row);
        }
        blur_line(inner, size * row, row, b, image);
    }
}
#endif
