/* Compares this CPU's kernels with plain C and tests the resizer's limits. Requires no libjpeg. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/resize.h"

static uint32_t state = 1;

static int32_t random_below(int32_t n) {
    state = state * 1664525u + 1013904223u;
    return (int32_t)((state >> 8) % (uint32_t)n);
}

static void fail(const char *what, int round) {
    fprintf(stderr, "test_resize: wrong %s in round %d\n", what, round);
    exit(1);
}

static void put_all(ws_resizer *r, const uint8_t *image, int32_t width, const ws_kernels *kernels) {
    const size_t pitch = 4 * (size_t)r->width + WS_SLACK;
    uint8_t *rows = malloc(2 * pitch);
    memset(rows, 0xAA, 2 * pitch);
    const uint8_t *source = image + 3 * ((int64_t)r->top * width + r->left);
    for (int32_t y = 0; y < r->height; y += 2, source += 6 * (int64_t)width) {
        const int pair = y + 1 < r->height;
        kernels->widen(source, r->width, rows);
        if (pair) kernels->widen(source + 3 * (int64_t)width, r->width, rows + pitch);
        ws_put(r, rows, pair ? rows + pitch : NULL);
    }
    free(rows);
}

static void compare_kernels(int round) {
    const int32_t height = 1 + random_below(90), width = 1 + random_below(90), size = 1 + random_below(70);
    const int32_t top = random_below(height), left = random_below(width);
    const ws_cut cut = {top, left, 1 + random_below(height - top), 1 + random_below(width - left),
                        1 + random_below(90), 1 + random_below(90), random_below(60) - 30, random_below(60) - 30};
    const ws_format format = {size, random_below(2) * WS_PILLOW_13 + random_below(2) * WS_BICUBIC};
    const int flip = random_below(2);
    const int32_t scale = 1 << random_below(3);
    uint8_t *image = malloc((size_t)(3 * height * width));
    for (int32_t i = 0; i < 3 * height * width; i++) image[i] = (uint8_t)(random_below(3) ? random_below(256) : 255);
    const ws_kernels *const kernels[2] = {&ws_scalar, ws_choose()};
    uint8_t *out[2];
    for (int k = 0; k < 2; k++) {
        ws_resizer r = {.kernels = kernels[k]};
        out[k] = malloc((size_t)(3 * size * size));
        memset(out[k], k + 1, (size_t)(3 * size * size));
        if (ws_check(&cut, height, width) != WS_OK) fail("result of ws_check", round);
        if (ws_begin(&r, &cut, scale, flip, &format, out[k]) != WS_OK) fail("result of ws_begin", round);
        put_all(&r, image, width, kernels[k]); /* at scale > 1, the first rows and columns serve as the scaled image */
        if (r.height && r.rows_out != r.vertical.count) fail("number of rows", round);
        ws_end(&r);
    }
    if (memcmp(out[0], out[1], (size_t)(3 * size * size)) != 0) fail("pixels", round);
    free(image);
    free(out[0]);
    free(out[1]);
}

static void test_many_taps(void) {
    const int32_t width = 65500;
    const ws_cut cut = {0, 0, 1, width, 1, 1, 0, 0};
    const ws_format format = {1, 0};
    ws_resizer r = {.kernels = ws_choose()};
    uint8_t *image = malloc(3 * (size_t)width), pixel[3];
    memset(image, 255, 3 * (size_t)width);
    if (ws_begin(&r, &cut, 1, 0, &format, pixel) != WS_OK) fail("result of ws_begin", -1);
    put_all(&r, image, width, r.kernels);
    if (pixel[0] != 255 || pixel[1] != 255 || pixel[2] != 255) fail("pixels of a white line", -1);
    ws_end(&r);
    free(image);
}

static void test_limits(void) {
    const ws_cut cuts[] = {{-1, 0, 2, 2, 1, 1, 0, 0}, {0, 0, 11, 2, 1, 1, 0, 0},  {9, 0, 2, 2, 1, 1, 0, 0},
                           {0, 9, 2, 2, 1, 1, 0, 0},  {0, 0, 0, 2, 1, 1, 0, 0},   {0, 0, 2, 2, 0, 1, 0, 0},
                           {0, 0, 2, 2, 1, -5, 0, 0}, {2147483647, 0, 2147483647, 2, 1, 1, 0, 0}};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++)
        if (ws_check(cuts + i, 10, 10) != WS_INVALID_CUT) fail("result for an invalid cut", (int)i);
    const ws_cut small = {0, 0, 1, 1, 1, 1, 0, 0}, wide = {0, 0, 1, 1, 65500, 65500, 0, 0};
    if (ws_check(&small, 65500, 65500) != WS_LIMIT || ws_check(&wide, 10, 10) != WS_LIMIT) fail("result for a large image", 0);
    const ws_cut tall = {0, 0, 65500, 2000, 1, 16384, 0, 0};
    const ws_format format = {16384, 0};
    ws_resizer r = {.kernels = ws_choose()};
    uint8_t *out = malloc(3u * 16384 * 16384);
    if (out && ws_begin(&r, &tall, 1, 0, &format, out) != WS_LIMIT) fail("result for a large ring", 0);
    ws_end(&r);
    free(out);
}

int main(void) {
    for (int round = 0; round < 3000; round++) compare_kernels(round);
    test_many_taps();
    test_limits();
    printf("test_resize: %s equals scalar\n", ws_choose()->name);
    return 0;
}
