/* Fuzz target: passes one image through all code that parses its bytes, and through random operations. The cuts are derived
   from the bytes, so that the corpus is a folder of plain JPEGs. Built with libFuzzer, or with driver.c if there is no clang. */
#include <stdlib.h>
#include <string.h>

#include "../src/worldsize.h"

enum { SIZE = 24, MAX_PIXELS = 1 << 21 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint32_t digest(const uint8_t *data, size_t size) {
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < size; i++) hash = (hash ^ data[i]) * 16777619u;
    return hash;
}

static int32_t draw(uint32_t *state, int32_t n) {
    *state = *state * 1664525u + 1013904223u;
    return n > 0 ? (int32_t)((*state >> 8) % (uint32_t)n) : 0;
}

static ws_cut cut_for(uint32_t *state, int32_t height, int32_t width) {
    const int32_t top = draw(state, height), left = draw(state, width);
    ws_cut cut = {top, left, 1 + draw(state, height - top), 1 + draw(state, width - left),
                  1 + draw(state, 60), 1 + draw(state, 60), draw(state, 60) - 30, draw(state, 60) - 30};
    if (draw(state, 3)) cut.y = cut.x = 0;
    if (!draw(state, 20)) cut.height += height; /* a box that extends past the image */
    return cut;
}

/* Any code, with values that are mostly in range, on two copies of an image. */
static void augment(uint32_t *state, uint8_t images[2][SIZE * SIZE * 3]) {
    ws_operation rows[2][4] = {{{0}}};
    for (int slot = 0; slot < 4; slot++) {
        rows[0][slot].code = draw(state, WS_OPERATIONS + 1);
        for (int i = 0; i < 7; i++) rows[0][slot].value[i] = draw(state, SIZE) / (double)(1 + 3 * draw(state, 2));
        for (int i = 0; i < 7; i++) rows[0][slot].value[i] -= draw(state, 4) ? 0 : SIZE / 2;
        rows[1][slot] = rows[0][slot];
    }
    const int valid_sums = draw(state, 3) ? 0 : 2;
    for (int i = 0; i < valid_sums; i++) {
        rows[i][0] = (ws_operation){WS_MIX_BEGIN, {0.3}};
        rows[i][2] = (ws_operation){WS_MIX_ADD, {0.7}};
        rows[i][3] = (ws_operation){WS_MIX_END, {0}};
    }
    memcpy(images[1], images[0], sizeof images[0]);
    if (ws_augment(2, 4, rows[0], (const uint8_t[3]){1, 2, 3}, SIZE, images[0]) == WS_NO_MEMORY) abort();
    if (memcmp(images[0], images[1], sizeof images[0])) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t out[2][SIZE * SIZE * 3];
    uint32_t state = digest(data, size);
    uint8_t *copy = malloc(size ? size : 1); /* of exactly this size, so that the sanitizer detects an overread */
    if (size) memcpy(copy, data, size);
    const uint8_t *const twice[2] = {copy, copy};
    const size_t sizes[2] = {size, size};
    int32_t heights[2], widths[2];
    uint8_t status[2], flips[2] = {(uint8_t)draw(&state, 2), 0};
    const int unsupported = ws_headers(2, twice, sizes, heights, widths, status);
    if (unsupported != 0 && unsupported != 2) abort();
    if ((int64_t)heights[0] * widths[0] <= MAX_PIXELS) {
        const ws_cut cut = cut_for(&state, heights[0], widths[0]);
        const ws_cut cuts[2] = {cut, cut};
        flips[1] = flips[0];
        const int failed = ws_decode(2, twice, sizes, cuts, flips, SIZE, draw(&state, 8), out[0], status);
        /* The same image twice in one call: no state of the first may leak into the second. */
        if (status[0] != status[1] || failed != 2 * (status[0] != WS_OK) || memcmp(out[0], out[1], sizeof out[0])) abort();
        if (unsupported && status[0] == WS_OK) abort();
        augment(&state, out);
    }
    free(copy);
    return 0;
}
