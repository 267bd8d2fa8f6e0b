/* Memory that the images of one call share, so that it is allocated once. */
#ifndef WS_WORKSPACE_H
#define WS_WORKSPACE_H

#include "resize.h"

typedef struct {
    ws_resizer resizer;
    uint8_t *rows;    /* two rows of 4-byte pixels */
    int64_t capacity; /* bytes allocated behind rows */
} ws_workspace;

/* Sets rows to two buffers of `bytes` bytes plus WS_SLACK each. Returns 0 if memory runs out, else 1. */
int ws_workspace_rows(ws_workspace *space, int64_t bytes, uint8_t *rows[2]);

void ws_workspace_free(ws_workspace *space);

#endif
