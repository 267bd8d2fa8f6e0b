/* One JPEG to the rows that a resizer wants. */
#ifndef WS_JPEG_H
#define WS_JPEG_H

#include "resize.h"

/* What the pictures of one call share: memory that is allocated once. */
typedef struct {
    ws_resizer resizer;
    uint8_t *rows; /* two rows of 4-byte pixels */
    int64_t room;
} ws_workspace;

/* Two rows of this many bytes and WS_SLACK each; 0 where there is no memory. */
int ws_two_rows(ws_workspace *space, int64_t bytes, uint8_t *rows[2]);

int ws_jpeg(ws_workspace *space, const uint8_t *data, size_t size, const ws_cut *cut, int flip, const ws_format *format,
            uint8_t *out);

#endif
