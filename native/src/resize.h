/* A streaming resizer: takes the rows of an image one after another and writes the finished cut. Keeps only the rows that
   the filter of one output row needs. Independent of JPEG. */
#ifndef WS_RESIZE_H
#define WS_RESIZE_H

#include "kernels.h"
#include "worldsize.h"

/* Settings shared by all images of a call. */
typedef struct {
    int32_t size, options;
} ws_format;

typedef struct {
    const ws_kernels *kernels;
    ws_axis horizontal, vertical;
    int32_t top, left; /* the needed part of the (scaled) image */
    int32_t height, width;
    int vertical_first;  /* which pass comes first */
    uint8_t *ring;       /* input of the vertical pass: the last `depth` rows, `pitch` bytes each */
    uint8_t *line[2];    /* if vertical_first: output rows of that pass */
    uint8_t *scratch[2]; /* output of the horizontal pass where it must not write past the end of a row */
    int64_t capacity, pitch;
    int32_t depth;
    const uint8_t **rows; /* input rows of one output row */
    int64_t rows_capacity;
    int32_t rows_in, rows_out; /* input rows received, output rows finished */
    uint8_t *out; /* the first pixel of the output that lies inside the grid */
    int64_t out_pitch;
} ws_resizer;

/* Whether the cut is valid for an image of this size: WS_OK, WS_INVALID_CUT or WS_LIMIT. */
int ws_check(const ws_cut *cut, int32_t height, int32_t width);

/* Starts a cut of an image decoded at 1/scale, into out (size x size x 3). Sets top, left, height and width to the rows and
   columns that ws_put must receive; there may be none. Returns WS_OK, WS_LIMIT or WS_NO_MEMORY. */
int ws_begin(ws_resizer *resizer, const ws_cut *cut, int32_t scale, int flip, const ws_format *format, uint8_t *out);

/* Passes the next row (b is NULL) or the next two rows, as 4-byte pixels starting at column `left`, with WS_SLACK. */
void ws_put(ws_resizer *resizer, const uint8_t *a, const uint8_t *b);

void ws_end(ws_resizer *resizer);

#endif
