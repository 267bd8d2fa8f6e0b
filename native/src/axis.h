/* Filter coefficients of a resize along one axis. */
#ifndef WS_AXIS_H
#define WS_AXIS_H

#include <stdint.h>

#define WS_FRACTION 22 /* fractional bits of a coefficient, as in Pillow: 32 minus 8 for the pixel and 2 spare */
#define WS_GROUP 4     /* kernels process this many taps, and this many outputs, at a time */

/* Output i is the sum over t < span[i] of taps[i * stride + t] * source[start[i] + t]. Taps from span[i] to stride are 0;
   stride is a multiple of WS_GROUP, and so is the number of allocated outputs: those from count on are all zeros.
   halves holds the same taps split into two 16-bit halves, taps = 256 * high + low: for each group of WS_GROUP taps, first
   all high halves, then all low halves. */
typedef struct {
    int32_t count, stride;
    int32_t begin, end; /* the used part of the source; start is relative to begin */
    int32_t *start, *span, *taps;
    int16_t *halves;
    int64_t capacity; /* bytes allocated behind start */
} ws_axis;

/* Computes Pillow's triangle filter (its antialiased BILINEAR), or its BICUBIC if is_cubic is not 0, from the source interval [from, to), a part of [0, length),
   to a grid of `grid` outputs, for outputs first .. first + count - 1 only; in reverse order if backwards is not 0.
   Returns 0, or -1 if memory runs out. */
int ws_axis_build(ws_axis *axis, double from, double to, int32_t length, int32_t grid, int32_t first, int32_t count,
                  int backwards, int is_cubic);

void ws_axis_free(ws_axis *axis);

#endif
