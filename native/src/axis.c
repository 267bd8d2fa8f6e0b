#include "axis.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int reserve(ws_axis *axis, int64_t outputs, int64_t stride) {
    const int64_t per_output = 2 * (int64_t)sizeof(int32_t) + stride * (int64_t)(sizeof(int32_t) + 2 * sizeof(int16_t));
    const int64_t needed = outputs * per_output;
    if (needed > axis->capacity) {
        free(axis->start);
        axis->start = malloc((size_t)needed);
        axis->capacity = axis->start ? needed : 0;
        if (!axis->start) return -1;
    }
    memset(axis->start, 0, (size_t)needed);
    axis->span = axis->start + outputs;
    axis->taps = axis->span + outputs;
    axis->halves = (int16_t *)(axis->taps + outputs * stride);
    return 0;
}

static double triangle(double x) {
    x = fabs(x);
    return x < 1.0 ? 1.0 - x : 0.0;
}

static double cubic(double x) {
    const double a = -0.5;
    x = fabs(x);
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
    return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * a : 0.0;
}

static int32_t fixed(double weight) { return (int32_t)((weight < 0 ? -0.5 : 0.5) + weight * (1 << WS_FRACTION)); }

/* Same operations in the same order as Pillow's src/libImaging/Resample.c, so that rounding gives bit-identical pixels. */
static void compute_taps(ws_axis *axis, int32_t i, double center, double scale, int is_cubic, int32_t length,
                         double *weights) {
    const double support = is_cubic ? 2.0 * scale : scale;
    const double step = 1.0 / scale;
    int32_t low = (int32_t)(center - support + 0.5);
    int32_t high = (int32_t)(center + support + 0.5);
    if (low < 0) low = 0;
    if (high > length) high = length;
    double total = 0.0;
    for (int32_t t = 0; t < high - low; t++) {
        const double x = (t + low - center + 0.5) * step;
        weights[t] = is_cubic ? cubic(x) : triangle(x);
        total += weights[t];
    }
    int32_t *taps = axis->taps + (int64_t)i * axis->stride;
    for (int32_t t = 0; t < high - low; t++) {
        const double weight = total != 0.0 ? weights[t] / total : weights[t];
        taps[t] = fixed(weight);
    }
    axis->start[i] = low;
    axis->span[i] = high - low;
}

static void split_taps(ws_axis *axis, int64_t outputs) {
    for (int64_t t = 0; t < outputs * axis->stride; t++) {
        int16_t *group = axis->halves + t / WS_GROUP * (2 * WS_GROUP) + t % WS_GROUP;
        group[0] = (int16_t)(axis->taps[t] >> 8);
        group[WS_GROUP] = (int16_t)(axis->taps[t] & 255);
    }
}

/* Makes start relative to the first used source position, so that unused ones need not be decoded. */
static void rebase(ws_axis *axis, int64_t outputs) {
    axis->begin = axis->start[0];
    axis->end = 0;
    for (int32_t i = 0; i < axis->count; i++) {
        if (axis->start[i] < axis->begin) axis->begin = axis->start[i];
        if (axis->start[i] + axis->span[i] > axis->end) axis->end = axis->start[i] + axis->span[i];
    }
    for (int32_t i = 0; i < axis->count; i++) axis->start[i] -= axis->begin;
    for (int64_t i = axis->count; i < outputs; i++) axis->start[i] = axis->start[axis->count - 1];
}

int ws_axis_build(ws_axis *axis, double from, double to, int32_t length, int32_t grid, int32_t first, int32_t count,
                  int backwards, int is_cubic) {
    const double scale = (to - from) / grid;
    const double filter = scale < 1.0 ? 1.0 : scale;
    const double support = is_cubic ? 2.0 * filter : filter;
    const int32_t max_taps = (int32_t)(2.0 * support + 1e-6) + 1; /* integers in an interval of length 2 * support */
    const int64_t outputs = ((int64_t)count + WS_GROUP - 1) / WS_GROUP * WS_GROUP;
    axis->count = count;
    axis->stride = (max_taps + WS_GROUP - 1) / WS_GROUP * WS_GROUP;
    double *weights = malloc(sizeof(double) * (size_t)max_taps);
    if (!weights || reserve(axis, outputs, axis->stride)) {
        free(weights);
        return -1;
    }
    for (int32_t i = 0; i < count; i++) {
        const int32_t output = first + (backwards ? count - 1 - i : i);
        compute_taps(axis, i, from + (output + 0.5) * scale, filter, is_cubic, length, weights);
    }
    free(weights);
    rebase(axis, outputs);
    split_taps(axis, outputs);
    return 0;
}

void ws_axis_free(ws_axis *axis) {
    free(axis->start);
    memset(axis, 0, sizeof *axis);
}
