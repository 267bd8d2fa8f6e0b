#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#include "jpeg.h"
#include "sniff.h"

#define STRING_OF(x) #x
#define STRING(x) STRING_OF(x)

static const ws_kernels *kernels;
static char version[64];

/* Runs when the library is loaded, before any thread can call it. */
__attribute__((constructor)) static void choose_kernels(void) {
    kernels = ws_choose();
    strcpy(version, "libjpeg-turbo " STRING(LIBJPEG_TURBO_VERSION) ", ");
    strcat(version, kernels->name);
}

int ws_interface(void) { return WS_INTERFACE; }

const char *ws_version(void) { return version; }

int ws_headers(int n, const uint8_t *const *data, const size_t *sizes, int32_t *heights, int32_t *widths, uint8_t *status) {
    int failed = 0;
    for (int i = 0; i < n; i++) {
        ws_dimensions dimensions;
        status[i] = (uint8_t)ws_sniff(data[i], sizes[i], &dimensions);
        heights[i] = status[i] == WS_OK ? dimensions.height : 0;
        widths[i] = status[i] == WS_OK ? dimensions.width : 0;
        failed += status[i] != WS_OK;
    }
    return failed;
}

/* Records the status; a failed image is all black, never partly decoded. */
static int set_status(int result, int32_t size, uint8_t *image, uint8_t *status) {
    *status = (uint8_t)result;
    if (result != WS_OK) memset(image, 0, (size_t)size * (size_t)size * 3);
    return result != WS_OK;
}

int ws_decode(int n, const uint8_t *const *data, const size_t *sizes, const ws_cut *cuts, const uint8_t *flips, int32_t size,
              int32_t options, uint8_t *out, uint8_t *status) {
    if (n < 0 || size < 1 || size > WS_MAX_SIZE) return -1;
    const ws_format format = {size, options};
    ws_workspace space = {.resizer = {.kernels = kernels}};
    int failed = 0;
    for (int i = 0; i < n; i++) {
        uint8_t *image = out + (size_t)i * (size_t)size * (size_t)size * 3;
        const int result = ws_jpeg(&space, data[i], sizes[i], cuts + i, flips[i], &format, image);
        failed += set_status(result, size, image, status + i);
    }
    ws_workspace_free(&space);
    return failed;
}

static int cut_raw(ws_workspace *space, const uint8_t *data, int32_t height, int32_t width, const ws_cut *cut, int flip,
               const ws_format *format, uint8_t *out) {
    ws_resizer *r = &space->resizer;
    uint8_t *rows[2];
    int result = ws_check(cut, height, width);
    if (result == WS_OK) result = ws_begin(r, cut, 1, flip, format, out);
    if (result != WS_OK || r->height == 0) return result;
    if (!ws_workspace_rows(space, 4 * (int64_t)r->width, rows)) return WS_NO_MEMORY;
    const int64_t pitch = 3 * (int64_t)width;
    const uint8_t *source = data + r->top * pitch + 3 * (int64_t)r->left;
    for (int32_t y = 0; y < r->height; y += 2, source += 2 * pitch) {
        const int pair = r->height - y > 1;
        r->kernels->widen(source, r->width, rows[0]);
        if (pair) r->kernels->widen(source + pitch, r->width, rows[1]);
        ws_put(r, rows[0], pair ? rows[1] : NULL);
    }
    return WS_OK;
}

int ws_raw(int n, const uint8_t *const *data, const int32_t *heights, const int32_t *widths, const ws_cut *cuts,
           const uint8_t *flips, int32_t size, int32_t options, uint8_t *out, uint8_t *status) {
    if (n < 0 || size < 1 || size > WS_MAX_SIZE) return -1;
    const ws_format format = {size, options};
    ws_workspace space = {.resizer = {.kernels = kernels}};
    int failed = 0;
    for (int i = 0; i < n; i++) {
        uint8_t *image = out + (size_t)i * (size_t)size * (size_t)size * 3;
        const int result = cut_raw(&space, data[i], heights[i], widths[i], cuts + i, flips[i], &format, image);
        failed += set_status(result, size, image, status + i);
    }
    ws_workspace_free(&space);
    return failed;
}
