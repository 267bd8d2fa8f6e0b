#include "resize.h"

#include <stdlib.h>
#include <string.h>

/* Pillow rejects larger images as decompression bombs. */
#define MAX_PIXELS 178956970
#define MAX_MEMORY ((int64_t)1 << 28) /* bytes */

int ws_check(const ws_cut *cut, int32_t height, int32_t width) {
    if (cut->top < 0 || cut->left < 0 || cut->height < 1 || cut->width < 1) return WS_INVALID_CUT;
    if (cut->height > height - cut->top || cut->width > width - cut->left) return WS_INVALID_CUT;
    if (cut->rows < 1 || cut->columns < 1) return WS_INVALID_CUT;
    if ((int64_t)height * width > MAX_PIXELS) return WS_LIMIT;
    if ((int64_t)cut->rows * cut->columns > MAX_PIXELS) return WS_LIMIT;
    return WS_OK;
}

/* The part of one axis of the grid that the output shows: first .. first + count - 1, starting at position `at` of the
   output. */
typedef struct {
    int32_t first, count, at;
} range;

static range visible(int32_t grid, int32_t offset, int32_t size) {
    const int64_t end = (int64_t)offset + size < grid ? (int64_t)offset + size : grid;
    const int32_t first = offset > 0 ? offset : 0;
    const range shown = {first, end > first ? (int32_t)(end - first) : 0, (int32_t)(first - (int64_t)offset)};
    return shown;
}

/* Pillow's order of the passes. Each pass rounds to 8 bits, so the order changes the pixels. */
static int is_vertical_first(const ws_cut *cut, int32_t options) {
    const int64_t fewer_rows = (int64_t)cut->height - cut->rows, fewer_columns = (int64_t)cut->width - cut->columns;
    return (options & WS_PILLOW_13) && fewer_rows > 0 && fewer_rows > 2 * fewer_columns;
}

static int reserve(ws_resizer *r) {
    const int64_t narrow = 3 * (int64_t)r->horizontal.count + WS_SLACK, wide = 4 * (int64_t)r->width + WS_SLACK;
    r->depth = r->vertical.stride + 2;
    r->pitch = r->vertical_first ? wide : narrow;
    const int64_t needed = r->depth * r->pitch + 2 * wide + 2 * narrow;
    if (needed > MAX_MEMORY) return WS_LIMIT;
    if (needed > r->capacity) {
        free(r->ring);
        r->ring = calloc(1, (size_t)needed);
        r->capacity = r->ring ? needed : 0;
    }
    if (r->depth > r->rows_capacity) {
        free(r->rows);
        r->rows = malloc((size_t)r->depth * sizeof *r->rows);
        r->rows_capacity = r->rows ? r->depth : 0;
    }
    if (!r->ring || !r->rows) return WS_NO_MEMORY;
    r->line[0] = r->ring + r->depth * r->pitch;
    r->line[1] = r->line[0] + wide;
    r->scratch[0] = r->line[1] + wide;
    r->scratch[1] = r->scratch[0] + narrow;
    return WS_OK;
}

/* Restricts the filter to the box. Positions are relative to the first scaled pixel that overlaps the box. */
static int build(ws_axis *axis, int32_t begin, int32_t length, int32_t scale, int32_t grid, range shown, int backwards,
                 int is_cubic) {
    const int32_t base = begin / scale;
    const int32_t last = (begin + length + scale - 1) / scale;
    const double from = (double)begin / scale - base;
    const double to = (double)(begin + length) / scale - base;
    return ws_axis_build(axis, from, to, last - base, grid, shown.first, shown.count, backwards, is_cubic);
}

int ws_begin(ws_resizer *r, const ws_cut *cut, int32_t scale, int flip, const ws_format *format, uint8_t *out) {
    const int32_t size = format->size;
    const range vertical = visible(cut->rows, cut->y, size), horizontal = visible(cut->columns, cut->x, size);
    const int covered = vertical.count == size && horizontal.count == size;
    if (!covered) memset(out, 0, (size_t)size * (size_t)size * 3);
    r->rows_in = r->rows_out = 0;
    r->height = r->width = 0;
    if (!vertical.count || !horizontal.count) return WS_OK;
    const int cubic = format->options & WS_BICUBIC;
    if (build(&r->vertical, cut->top, cut->height, scale, cut->rows, vertical, 0, cubic)) return WS_NO_MEMORY;
    if (build(&r->horizontal, cut->left, cut->width, scale, cut->columns, horizontal, flip, cubic)) return WS_NO_MEMORY;
    r->top = cut->top / scale + r->vertical.begin;
    r->left = cut->left / scale + r->horizontal.begin;
    r->height = r->vertical.end - r->vertical.begin;
    r->width = r->horizontal.end - r->horizontal.begin;
    const int32_t column = flip ? size - horizontal.at - horizontal.count : horizontal.at;
    r->out_pitch = 3 * (int64_t)size;
    r->out = out + vertical.at * r->out_pitch + 3 * (int64_t)column;
    r->vertical_first = is_vertical_first(cut, format->options);
    return reserve(r);
}

static uint8_t *ring_row(const ws_resizer *r, int32_t row) { return r->ring + (row % r->depth) * r->pitch; }

static int ready(const ws_resizer *r) {
    return r->rows_out < r->vertical.count && r->vertical.start[r->rows_out] + r->vertical.span[r->rows_out] <= r->rows_in;
}

static void finish_row(ws_resizer *r, int64_t bytes, uint8_t *target) {
    const int32_t start = r->vertical.start[r->rows_out], span = r->vertical.span[r->rows_out];
    for (int32_t t = 0; t < span; t++) r->rows[t] = ring_row(r, start + t);
    r->rows[span] = r->rows[0];
    r->kernels->vertical(&r->vertical, r->rows_out, r->rows, bytes, target);
    r->rows_out++;
}

static void put_horizontal_first(ws_resizer *r, const uint8_t *const source[2], int pair) {
    uint8_t *const target[2] = {ring_row(r, r->rows_in), pair ? ring_row(r, r->rows_in + 1) : r->scratch[1]};
    r->kernels->horizontal(&r->horizontal, source, target);
    r->rows_in += 1 + pair;
    while (ready(r)) finish_row(r, 3 * (int64_t)r->horizontal.count, r->out + r->rows_out * r->out_pitch);
}

static void put_vertical_first(ws_resizer *r, const uint8_t *const source[2], int pair) {
    const size_t bytes = 4 * (size_t)r->width, width = 3 * (size_t)r->horizontal.count;
    memcpy(ring_row(r, r->rows_in), source[0], bytes);
    if (pair) memcpy(ring_row(r, r->rows_in + 1), source[1], bytes);
    r->rows_in += 1 + pair;
    while (ready(r)) {
        uint8_t *const target = r->out + r->rows_out * r->out_pitch;
        finish_row(r, (int64_t)bytes, r->line[0]);
        const int second = ready(r);
        if (second) finish_row(r, (int64_t)bytes, r->line[1]);
        r->kernels->horizontal(&r->horizontal, (const uint8_t *const *)r->line, r->scratch);
        memcpy(target, r->scratch[0], width);
        if (second) memcpy(target + r->out_pitch, r->scratch[1], width);
    }
}

void ws_put(ws_resizer *r, const uint8_t *a, const uint8_t *b) {
    const uint8_t *const source[2] = {a, b ? b : a};
    (r->vertical_first ? put_vertical_first : put_horizontal_first)(r, source, b != NULL);
}

void ws_end(ws_resizer *r) {
    ws_axis_free(&r->horizontal);
    ws_axis_free(&r->vertical);
    free(r->ring);
    free(r->rows);
    memset(r, 0, sizeof *r);
}
