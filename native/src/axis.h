/* Where each output of a resize along one axis gets its light from. */
#ifndef WS_AXIS_H
#define WS_AXIS_H

#include <stdint.h>

#define WS_FRACTION 22 /* bits after the point of a coefficient, as in Pillow: 32 less 8 of the pixel and 2 to spare */
#define WS_GROUP 4     /* the kernels take this many taps, and this many outputs, at a time */

/* Output i is the sum over t < span[i] of taps[i * stride + t] * source[start[i] + t]. Taps from span[i] to stride are 0;
   stride is a multiple of WS_GROUP, and so is the number of outputs present: those from count on have only zeros.
   halves has the same taps in two halves of 16 bits, taps = 256 * high + low: for each WS_GROUP of them, first all high
   ones, then all low ones. */
typedef struct {
    int32_t count, stride;
    int32_t begin, end; /* the part of the source that is used at all; start counts from begin */
    int32_t *start, *span, *taps;
    int16_t *halves;
    int64_t room; /* bytes allocated behind start */
} ws_axis;

/* Pillow's triangle filter (its antialiased BILINEAR) from the source interval [from, to), a part of [0, length), to a
   grid of `grid` outputs, of which first .. first + count - 1 are wanted; backwards: in reverse order.
   0, or -1 where there is no memory. */
int ws_axis_build(ws_axis *axis, double from, double to, int32_t length, int32_t grid, int32_t first, int32_t count,
                  int backwards);

void ws_axis_free(ws_axis *axis);

#endif
