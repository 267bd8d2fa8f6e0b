/* All operations of augmentation policies. Compiled once for each instruction set, by files that define WS_APPLY as the name
   of the function. The compiler's own vectorization gives the same bytes in each: no sum is reordered. */
#include "affine.h"
#include "blur.h"
#include "kernels.h"
#include "mix.h"
#include "tone.h"

static void erase(const double value[7], int32_t size, uint8_t *image) {
    const uint8_t fill[3] = {(uint8_t)value[4], (uint8_t)value[5], (uint8_t)value[6]};
    const int32_t top = (int32_t)value[0], left = (int32_t)value[1];
    for (int32_t y = top; y < top + (int32_t)value[2]; y++) {
        for (int32_t x = left; x < left + (int32_t)value[3]; x++) memcpy(image + 3 * ((int64_t)y * size + x), fill, 3);
    }
}

void WS_APPLY(const ws_operation *o, const uint8_t fill[3], int32_t size, uint8_t *copy, const ws_mix *mix, uint8_t *image) {
    const int64_t pixels = (int64_t)size * size;
    const double *p = o->value;
    const int code = (int)o->code;
    switch (code) {
        case WS_AFFINE_NEAREST:
        case WS_AFFINE_BILINEAR:
        case WS_AFFINE_BICUBIC:
            ws_choose()->widen(image, pixels, copy);
            affine(code, p, fill, size, copy, image);
            break;
        case WS_SHARPNESS:
            memcpy(copy, image, (size_t)pixels * 3);
            sharpness(p[0], size, copy, image);
            break;
        case WS_BRIGHTNESS: brightness(p[0], pixels, image); break;
        case WS_COLOR: color(p[0], pixels, image); break;
        case WS_CONTRAST: contrast(p[0], pixels, image); break;
        case WS_POSTERIZE: posterize((int)p[0], pixels, image); break;
        case WS_SOLARIZE: solarize(p[0], pixels, image); break;
        case WS_SOLARIZE_ADD: solarize_add((int)p[0], p[1], pixels, image); break;
        case WS_AUTOCONTRAST: autocontrast(pixels, image); break;
        case WS_EQUALIZE: equalize(pixels, image); break;
        case WS_HUE: hue((int)p[0], pixels, image); break;
        case WS_ERASE: erase(p, size, image); break;
        case WS_BLUR: blur(p[0], size, copy, image); break;
        case WS_SHIFT: shift(p, pixels, image); break;
        case WS_MIX_BEGIN: mix_begin((float)p[0], 3 * pixels, image, mix); break;
        case WS_MIX_ADD: mix_add((float)p[0], 3 * pixels, image, mix); break;
        case WS_MIX_END: mix_end(3 * pixels, image, mix); break;
        default: break;
    }
}
