#include "resize.h"

#include <stdlib.h>
#include <string.h>

/* Pillow takes a picture of more pixels for a decompression bomb. */
#define MOST_PIXELS 178956970
#define MOST_MEMORY ((int64_t)1 << 28)

int ws_check(const ws_cut *cut, int32_t height, int32_t width) {
    if (cut->top < 0 || cut->left < 0 || cut->height < 1 || cut->width < 1) return WS_MISFIT;
    if (cut->height > height - cut->top || cut->width > width - cut->left) return WS_MISFIT;
    if (cut->rows < 1 || cut->columns < 1) return WS_MISFIT;
    if ((int64_t)height * width > MOST_PIXELS) return WS_LIMIT;
    if ((int64_t)cut->rows * cut->columns > MOST_PIXELS) return WS_LIMIT;
    return WS_DONE;
}

/* The outputs of one axis that the window shows: first .. first + count - 1 of the grid, from place `at` of the window on. */
typedef struct {
    int32_t first, count, at;
} part;

static part visible(int32_t grid, int32_t offset, int32_t size) {
    const int64_t end = (int64_t)offset + size < grid ? (int64_t)offset + size : grid;
    const int32_t first = offset > 0 ? offset : 0;
    const part shown = {first, end > first ? (int32_t)(end - first) : 0, (int32_t)(first - (int64_t)offset)};
    return shown;
}

/* Pillow's order of the passes; each rounds to 8 bits, so the order shows. */
static int down_first(const ws_cut *cut, int32_t options) {
    const int64_t fewer_rows = (int64_t)cut->height - cut->rows, fewer_columns = (int64_t)cut->width - cut->columns;
    return (options & WS_PILLOW_13) && fewer_rows > 0 && fewer_rows > 2 * fewer_columns;
}

static int reserve(ws_resizer *r) {
    const int64_t narrow = 3 * (int64_t)r->across.count + WS_SLACK, wide = 4 * (int64_t)r->width + WS_SLACK;
    r->depth = r->down.stride + 2;
    r->pitch = r->down_first ? wide : narrow;
    const int64_t needed = r->depth * r->pitch + 2 * wide + 2 * narrow;
    if (needed > MOST_MEMORY) return WS_LIMIT;
    if (needed > r->room) {
        free(r->ring);
        r->ring = calloc(1, (size_t)needed);
        r->room = r->ring ? needed : 0;
    }
    if (r->depth > r->rows_room) {
        free(r->rows);
        r->rows = malloc((size_t)r->depth * sizeof *r->rows);
        r->rows_room = r->rows ? r->depth : 0;
    }
    if (!r->ring || !r->rows) return WS_MEMORY;
    r->line[0] = r->ring + r->depth * r->pitch;
    r->line[1] = r->line[0] + wide;
    r->spare[0] = r->line[1] + wide;
    r->spare[1] = r->spare[0] + narrow;
    return WS_DONE;
}

/* The filter is confined to the box: its pixels are counted from the first scaled pixel that touches it. */
static int build(ws_axis *axis, int32_t begin, int32_t length, int32_t scale, int32_t grid, part shown, int backwards) {
    const int32_t base = begin / scale;
    const int32_t last = (begin + length + scale - 1) / scale;
    const double from = (double)begin / scale - base;
    const double to = (double)(begin + length) / scale - base;
    return ws_axis_build(axis, from, to, last - base, grid, shown.first, shown.count, backwards);
}

int ws_begin(ws_resizer *r, const ws_cut *cut, int32_t scale, int flip, const ws_format *format, uint8_t *out) {
    const int32_t size = format->size;
    const part down = visible(cut->rows, cut->y, size), across = visible(cut->columns, cut->x, size);
    const int whole = down.count == size && across.count == size;
    if (!whole) memset(out, 0, (size_t)size * (size_t)size * 3);
    r->seen = r->made = 0;
    r->height = r->width = 0;
    if (!down.count || !across.count) return WS_DONE;
    if (build(&r->down, cut->top, cut->height, scale, cut->rows, down, 0)) return WS_MEMORY;
    if (build(&r->across, cut->left, cut->width, scale, cut->columns, across, flip)) return WS_MEMORY;
    r->top = cut->top / scale + r->down.begin;
    r->left = cut->left / scale + r->across.begin;
    r->height = r->down.end - r->down.begin;
    r->width = r->across.end - r->across.begin;
    const int32_t column = flip ? size - across.at - across.count : across.at;
    r->out_pitch = 3 * (int64_t)size;
    r->out = out + down.at * r->out_pitch + 3 * (int64_t)column;
    r->down_first = down_first(cut, format->options);
    return reserve(r);
}

static uint8_t *ring_row(const ws_resizer *r, int32_t row) { return r->ring + (row % r->depth) * r->pitch; }

static int ready(const ws_resizer *r) {
    return r->made < r->down.count && r->down.start[r->made] + r->down.span[r->made] <= r->seen;
}

static void down(ws_resizer *r, int64_t bytes, uint8_t *target) {
    const int32_t start = r->down.start[r->made], span = r->down.span[r->made];
    for (int32_t t = 0; t < span; t++) r->rows[t] = ring_row(r, start + t);
    r->rows[span] = r->rows[0];
    r->kernels->down(&r->down, r->made, r->rows, bytes, target);
    r->made++;
}

static void put_across_first(ws_resizer *r, const uint8_t *const source[2], int two) {
    uint8_t *const target[2] = {ring_row(r, r->seen), two ? ring_row(r, r->seen + 1) : r->spare[1]};
    r->kernels->across(&r->across, source, target);
    r->seen += 1 + two;
    while (ready(r)) down(r, 3 * (int64_t)r->across.count, r->out + r->made * r->out_pitch);
}

static void put_down_first(ws_resizer *r, const uint8_t *const source[2], int two) {
    const size_t bytes = 4 * (size_t)r->width, width = 3 * (size_t)r->across.count;
    memcpy(ring_row(r, r->seen), source[0], bytes);
    if (two) memcpy(ring_row(r, r->seen + 1), source[1], bytes);
    r->seen += 1 + two;
    while (ready(r)) {
        uint8_t *const target = r->out + r->made * r->out_pitch;
        down(r, (int64_t)bytes, r->line[0]);
        const int again = ready(r);
        if (again) down(r, (int64_t)bytes, r->line[1]);
        r->kernels->across(&r->across, (const uint8_t *const *)r->line, r->spare);
        memcpy(target, r->spare[0], width);
        if (again) memcpy(target + r->out_pitch, r->spare[1], width);
    }
}

void ws_put(ws_resizer *r, const uint8_t *a, const uint8_t *b) {
    const uint8_t *const source[2] = {a, b ? b : a};
    (r->down_first ? put_down_first : put_across_first)(r, source, b != NULL);
}

void ws_end(ws_resizer *r) {
    ws_axis_free(&r->across);
    ws_axis_free(&r->down);
    free(r->ring);
    free(r->rows);
    memset(r, 0, sizeof *r);
}
