/* A picture's rows go in one after the other, and the finished cut comes out: only the rows of one output's filter are
   kept. Knows nothing of JPEG. */
#ifndef WS_RESIZE_H
#define WS_RESIZE_H

#include "kernels.h"
#include "worldsize.h"

/* What all pictures of a call have in common. */
typedef struct {
    int32_t size, options;
} ws_format;

typedef struct {
    const ws_kernels *kernels;
    ws_axis across, down;
    int32_t top, left; /* the part of the (scaled) picture whose rows and columns are wanted */
    int32_t height, width;
    int down_first;    /* which pass comes first */
    uint8_t *ring;     /* the last `depth` rows before the pass down, `pitch` bytes each */
    uint8_t *line[2];  /* down_first: finished rows of that pass */
    uint8_t *spare[2]; /* what the pass across writes where it must not write beyond a row's end */
    int64_t room, pitch;
    int32_t depth;
    const uint8_t **rows; /* the rows of one output */
    int64_t rows_room;
    int32_t seen, made; /* rows put in, and output rows finished */
    uint8_t *out;       /* the first pixel of the window that lies in the grid */
    int64_t out_pitch;
} ws_resizer;

/* Whether the cut makes sense for a picture of this size: WS_DONE, WS_MISFIT or WS_LIMIT. */
int ws_check(const ws_cut *cut, int32_t height, int32_t width);

/* Begin a cut of a picture that is decoded at 1/scale, into out (size x size x 3); sets top, left, height and width to
   the rows and columns that must be put in, which may be none. WS_DONE, WS_LIMIT or WS_MEMORY. */
int ws_begin(ws_resizer *resizer, const ws_cut *cut, int32_t scale, int flip, const ws_format *format, uint8_t *out);

/* The next row, or the next two (b other than NULL), of 4-byte pixels, from column `left` on, with WS_SLACK. */
void ws_put(ws_resizer *resizer, const uint8_t *a, const uint8_t *b);

void ws_end(ws_resizer *resizer);

#endif
