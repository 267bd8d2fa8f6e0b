/* A weighted sum of augmented copies of an image, as in AugMix. */
#include <string.h>

#include "kernels.h"

static void mix_begin(float weight, int64_t values, const uint8_t *image, const ws_mix *mix) {
    memcpy(mix->kept, image, (size_t)values);
    for (int64_t i = 0; i < values; i++) mix->sum[i] = weight * (float)image[i];
}

static void mix_add(float weight, int64_t values, uint8_t *image, const ws_mix *mix) {
    for (int64_t i = 0; i < values; i++) mix->sum[i] += weight * (float)image[i];
    memcpy(image, mix->kept, (size_t)values);
}

static void mix_end(int64_t values, uint8_t *image, const ws_mix *mix) {
    for (int64_t i = 0; i < values; i++) image[i] = (uint8_t)mix->sum[i];
}
