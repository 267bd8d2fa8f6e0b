#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#include "jpeg.h"
#include "sniff.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define LARGEST_SIZE 16384

static const ws_kernels *kernels;
static char version[64];

/* Before any thread can call anything. */
__attribute__((constructor)) static void choose(void) {
    kernels = ws_choose();
    strcpy(version, "libjpeg-turbo " TEXT(LIBJPEG_TURBO_VERSION) ", ");
    strcat(version, kernels->name);
}

int ws_interface(void) { return WS_INTERFACE; }

const char *ws_version(void) { return version; }

/* libjpeg-turbo writes rows that lie at a multiple of 32 bytes around the cache, and reading them back would take longer
   than all of the resize. So none lies there. */
int ws_two_rows(ws_workspace *space, int64_t bytes, uint8_t *rows[2]) {
    const int64_t pitch = (bytes + WS_SLACK) / 32 * 32 + 32;
    const int64_t needed = 2 * pitch + 32;
    if (needed > space->room) {
        free(space->rows);
        space->rows = calloc(1, (size_t)needed);
        space->room = space->rows ? needed : 0;
        if (!space->rows) return 0;
    }
    rows[0] = space->rows + ((uintptr_t)space->rows % 32 == 0 ? 16 : 0);
    rows[1] = rows[0] + pitch;
    return 1;
}

static void release(ws_workspace *space) {
    ws_end(&space->resizer);
    free(space->rows);
}

int ws_headers(int n, const uint8_t *const *data, const size_t *sizes, int32_t *heights, int32_t *widths, uint8_t *status) {
    int failed = 0;
    for (int i = 0; i < n; i++) {
        ws_head head;
        status[i] = (uint8_t)ws_sniff(data[i], sizes[i], &head);
        heights[i] = status[i] == WS_DONE ? head.height : 0;
        widths[i] = status[i] == WS_DONE ? head.width : 0;
        failed += status[i] != WS_DONE;
    }
    return failed;
}

/* Broken pictures are black, not half a picture. */
static int settle(int result, int32_t size, uint8_t *picture, uint8_t *status) {
    *status = (uint8_t)result;
    if (result != WS_DONE) memset(picture, 0, (size_t)size * (size_t)size * 3);
    return result != WS_DONE;
}

int ws_decode(int n, const uint8_t *const *data, const size_t *sizes, const ws_cut *cuts, const uint8_t *flips, int32_t size,
              int32_t options, uint8_t *out, uint8_t *status) {
    if (n < 0 || size < 1 || size > LARGEST_SIZE) return -1;
    const ws_format format = {size, options};
    ws_workspace space = {.resizer = {.kernels = kernels}};
    int failed = 0;
    for (int i = 0; i < n; i++) {
        uint8_t *picture = out + (size_t)i * (size_t)size * (size_t)size * 3;
        const int result = ws_jpeg(&space, data[i], sizes[i], cuts + i, flips[i], &format, picture);
        failed += settle(result, size, picture, status + i);
    }
    release(&space);
    return failed;
}

static int raw(ws_workspace *space, const uint8_t *data, int32_t height, int32_t width, const ws_cut *cut, int flip,
               const ws_format *format, uint8_t *out) {
    ws_resizer *r = &space->resizer;
    uint8_t *rows[2];
    int result = ws_check(cut, height, width);
    if (result == WS_DONE) result = ws_begin(r, cut, 1, flip, format, out);
    if (result != WS_DONE || r->height == 0) return result;
    if (!ws_two_rows(space, 4 * (int64_t)r->width, rows)) return WS_MEMORY;
    const int64_t pitch = 3 * (int64_t)width;
    const uint8_t *source = data + r->top * pitch + 3 * (int64_t)r->left;
    for (int32_t y = 0; y < r->height; y += 2, source += 2 * pitch) {
        const int two = r->height - y > 1;
        r->kernels->widen(source, r->width, rows[0]);
        if (two) r->kernels->widen(source + pitch, r->width, rows[1]);
        ws_put(r, rows[0], two ? rows[1] : NULL);
    }
    return WS_DONE;
}

int ws_raw(int n, const uint8_t *const *data, const int32_t *heights, const int32_t *widths, const ws_cut *cuts,
           const uint8_t *flips, int32_t size, int32_t options, uint8_t *out, uint8_t *status) {
    if (n < 0 || size < 1 || size > LARGEST_SIZE) return -1;
    const ws_format format = {size, options};
    ws_workspace space = {.resizer = {.kernels = kernels}};
    int failed = 0;
    for (int i = 0; i < n; i++) {
        uint8_t *picture = out + (size_t)i * (size_t)size * (size_t)size * 3;
        const int result = raw(&space, data[i], heights[i], widths[i], cuts + i, flips[i], &format, picture);
        failed += settle(result, size, picture, status + i);
    }
    release(&space);
    return failed;
}
