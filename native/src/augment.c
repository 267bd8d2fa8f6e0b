#include <math.h>
#include <stdlib.h>

#include "kernels.h"

static int integer(double v, int low, int high) { return v >= low && v <= high && v == floor(v); }

/* Whether the map takes every corner to coordinates that 16.16 fixed-point numbers can hold. */
static int moderate(const double m[6], int32_t size) {
    for (int corner = 0; corner < 4; corner++) {
        const double x = corner & 1 ? size : 0, y = corner & 2 ? size : 0;
        if (!(fabs(m[0] * x + m[1] * y + m[2]) < 32768 && fabs(m[3] * x + m[4] * y + m[5]) < 32768)) return 0;
    }
    return 1;
}

static int valid(const ws_operation *o, int32_t size) {
    const double *p = o->value;
    if (!integer(o->code, 0, WS_OPERATIONS - 1)) return 0;
    switch ((int)o->code) {
        case WS_AFFINE_NEAREST:
        case WS_AFFINE_BILINEAR:
        case WS_AFFINE_BICUBIC: return moderate(p, size);
        case WS_BRIGHTNESS:
        case WS_COLOR:
        case WS_CONTRAST:
        case WS_SHARPNESS: return fabs(p[0]) < 1e6;
        case WS_POSTERIZE: return integer(p[0], 0, 8);
        case WS_SOLARIZE: return p[0] == p[0];
        case WS_SOLARIZE_ADD: return integer(p[0], 0, 255) && p[1] == p[1];
        case WS_BLUR: return p[0] >= 0 && p[0] <= WS_MAX_BLUR;
        case WS_HUE: return integer(p[0], 0, 255);
        case WS_SHIFT: return integer(p[0], -255, 255) && integer(p[1], -255, 255) && integer(p[2], -255, 255);
        case WS_ERASE:
            for (int i = 0; i < 4; i++) {
                if (!integer(p[i], 0, size)) return 0;
            }
            for (int c = 4; c < 7; c++) {
                if (!integer(p[c], 0, 255)) return 0;
            }
            return p[0] + p[2] <= size && p[1] + p[3] <= size;
        case WS_MIX_BEGIN:
        case WS_MIX_ADD: return p[0] >= 0 && p[0] <= 1;
        default: return 1;
    }
}

enum { NO_MIX, HAS_MIX, BAD_MIX };

/* Whether the sums of an image begin, go on and end in this order, with weights that keep them in the range of a byte. */
static int mixes(const ws_operation *operations, int slots) {
    int open = 0, found = NO_MIX;
    double weight = 0;
    for (int slot = 0; slot < slots; slot++) {
        const int code = (int)operations[slot].code;
        if (code < WS_MIX_BEGIN) continue;
        if (open == (code == WS_MIX_BEGIN)) return BAD_MIX;
        weight = (code == WS_MIX_BEGIN ? 0 : weight) + (code == WS_MIX_END ? 0 : operations[slot].value[0]);
        if (weight > 1 + 1e-6) return BAD_MIX;
        open = code != WS_MIX_END;
        found = HAS_MIX;
    }
    return open ? BAD_MIX : found;
}

int ws_augment(int n, int slots, const ws_operation *operations, const uint8_t *fill, int32_t size, uint8_t *images) {
    if (n < 0 || slots < 0 || size < 1 || size > WS_MAX_SIZE) return WS_INVALID_OPERATION;
    const int64_t bytes = 3 * (int64_t)size * size, count = (int64_t)n * slots;
    for (int64_t i = 0; i < count; i++) {
        if (!valid(operations + i, size)) return WS_INVALID_OPERATION;
    }
    int mixing = 0;
    for (int i = 0; i < n; i++) {
        const int found = mixes(operations + (int64_t)i * slots, slots);
        if (found == BAD_MIX) return WS_INVALID_OPERATION;
        mixing |= found == HAS_MIX;
    }
    const ws_kernels *const kernels = ws_choose();
    uint8_t *copy = malloc((size_t)size * ((size_t)size * 4 + WS_BLUR_ROWS * 3) + WS_SLACK);
    const ws_mix mix = {mixing ? malloc((size_t)bytes * sizeof(float)) : NULL, mixing ? malloc((size_t)bytes) : NULL};
    const int enough = copy && (!mixing || (mix.sum && mix.kept));
    for (int64_t i = 0; enough && i < count; i++) {
        kernels->apply(operations + i, fill, size, copy, &mix, images + i / slots * bytes);
    }
    free(copy);
    free(mix.sum);
    free(mix.kept);
    return enough ? WS_OK : WS_NO_MEMORY;
}
