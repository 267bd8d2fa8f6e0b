#include "workspace.h"

#include <stdlib.h>
#include <string.h>

/* libjpeg-turbo writes rows aligned to 32 bytes with non-temporal stores, which bypass the cache. Reading such rows back
   would take longer than the whole resize, so these rows are never aligned to 32 bytes. */
int ws_workspace_rows(ws_workspace *space, int64_t bytes, uint8_t *rows[2]) {
    const int64_t pitch = (bytes + WS_SLACK) / 32 * 32 + 32;
    const int64_t needed = 2 * pitch + 32;
    if (needed > space->capacity) {
        free(space->rows);
        space->rows = calloc(1, (size_t)needed);
        space->capacity = space->rows ? needed : 0;
        if (!space->rows) return 0;
    }
    rows[0] = space->rows + ((uintptr_t)space->rows % 32 == 0 ? 16 : 0);
    rows[1] = rows[0] + pitch;
    return 1;
}

void ws_workspace_free(ws_workspace *space) {
    ws_end(&space->resizer);
    free(space->rows);
    memset(space, 0, sizeof *space);
}
