/* Batch image decoding: JPEG bytes or raw pixels in, uint8 pixels of one size out. Also augmentation of such pixels, and
   batch reading of files.

   A plain C ABI for ctypes. The library starts no threads, prints nothing and keeps no state except the kernels that it
   selects when it is loaded, so it is thread-safe. Each image has its own status: an image that fails has a status other
   than WS_OK and black pixels, and does not affect the others. */
#ifndef WORLDSIZE_H
#define WORLDSIZE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define WS_API __attribute__((visibility("default")))
#else
#define WS_API
#endif

/* Version of this interface; increase it with every change below. worldsize.data.images.native checks it first, because a library
   built from older sources stays in place until worldsize is installed again. */
enum { WS_INTERFACE = 8 };
WS_API int ws_interface(void);

enum {
    WS_OK = 0,
    WS_UNSUPPORTED = 1, /* not a plain 8-bit JPEG with 1 or 3 components: use another decoder */
    WS_DAMAGED = 2,     /* libjpeg reported an error or a warning */
    WS_LIMIT = 3,       /* too many pixels, scans or bytes */
    WS_INVALID_CUT = 4, /* the cut lies outside the image */
    WS_NO_MEMORY = 5,
    WS_INVALID_OPERATION = 6
};

enum { WS_MAX_SIZE = 16384 }; /* side of the output, pixels */

/* A cut is a crop, a resize and a second crop: the box (top, left, height, width; pixels of the image) is resized to a grid
   of rows x columns, and the size x size output starts at (y, x) of that grid. y and x may be negative, and the output may
   extend past the grid; it is black there. */
typedef struct {
    int32_t top, left, height, width;
    int32_t rows, columns;
    int32_t y, x;
} ws_cut;

/* Reads heights and widths of n JPEGs from their headers. Status WS_OK: ws_decode can try this image.
   Returns the number of images with another status. */
WS_API int ws_headers(int n, const uint8_t *const *data, const size_t *sizes, int32_t *heights, int32_t *widths,
                      uint8_t *status);

enum {
    WS_SCALING = 1,  /* decode at 1/2 or 1/4 if the box stays at least as large as the grid */
    WS_PILLOW_13 = 2, /* vertical pass first where Pillow 13 does so: if the height shrinks by more than twice as many
                         pixels as the width. Otherwise, the horizontal pass comes first. */
    WS_BICUBIC = 4    /* resize with Pillow's BICUBIC instead of its BILINEAR; both are antialiased */
};

/* Decodes n JPEGs and writes their cuts to out (n x size x size x 3, RGB). A nonzero flips[i] mirrors image i left to right.
   Returns the number of images with a status other than WS_OK, or -1 if n or size is out of range (size: 1 to 16384). */
WS_API int ws_decode(int n, const uint8_t *const *data, const size_t *sizes, const ws_cut *cuts, const uint8_t *flips,
                     int32_t size, int32_t options, uint8_t *out, uint8_t *status);

/* The same for raw RGB images: data[i] has heights[i] x widths[i] x 3 bytes. */
WS_API int ws_raw(int n, const uint8_t *const *data, const int32_t *heights, const int32_t *widths, const ws_cut *cuts,
                  const uint8_t *flips, int32_t size, int32_t options, uint8_t *out, uint8_t *status);

/* The operations of augmentation policies, with their values. Pixels equal those of the Pillow 13 function in brackets. */
enum {
    WS_IDENTITY = 0,
    WS_AFFINE_NEAREST = 1,  /* the inverse affine map, 6 values [Image.transform] */
    WS_AFFINE_BILINEAR = 2,
    WS_AFFINE_BICUBIC = 3,
    WS_BRIGHTNESS = 4,      /* factor [ImageEnhance.Brightness, and so on] */
    WS_COLOR = 5,           /* factor */
    WS_CONTRAST = 6,        /* factor */
    WS_SHARPNESS = 7,       /* factor */
    WS_POSTERIZE = 8,       /* bits to keep, 0 to 8 [ImageOps.posterize] */
    WS_SOLARIZE = 9,        /* threshold: levels from it on are inverted [ImageOps.solarize] */
    WS_SOLARIZE_ADD = 10,   /* addend 0 to 255; threshold: levels below it are raised */
    WS_AUTOCONTRAST = 11,   /* [ImageOps.autocontrast] */
    WS_EQUALIZE = 12,       /* [ImageOps.equalize] */
    WS_HUE = 13,            /* added to the hue modulo 256, 0 to 255 [convert("HSV") and back] */
    WS_ERASE = 14,          /* top, left, height, width; the color: red, green, blue */
    WS_SHIFT = 15,          /* added to red, green and blue, -255 to 255; the results are clipped to 0..255 */
    WS_BLUR = 16,           /* standard deviation in pixels, 0 to WS_MAX_BLUR [ImageFilter.GaussianBlur] */
    WS_MIX_BEGIN = 17,      /* weight 0 to 1: begin a sum with this much of the image */
    WS_MIX_ADD = 18,        /* weight 0 to 1: add this much of the image, as it is now, and continue with that of WS_MIX_BEGIN */
    WS_MIX_END = 19,        /* continue with the sum, computed in float32 and rounded down; its weights are at most 1 in all */
    WS_OPERATIONS = 20
};

enum { WS_MAX_BLUR = 2 };

typedef struct {
    double code;     /* one of the above */
    double value[7]; /* unused ones are ignored */
} ws_operation;

/* Applies `slots` operations to each of n images (n x size x size x 3, RGB), in place and in order: operations[i * slots] and
   following are those of image i. fill: the color of what an affine map brings in. Returns WS_OK; WS_INVALID_OPERATION if
   some operation or value is out of range or a WS_MIX_* has no place, or WS_NO_MEMORY, and then no image has changed. */
WS_API int ws_augment(int n, int slots, const ws_operation *operations, const uint8_t *fill, int32_t size, uint8_t *images);

/* Reads n pieces into out, one after another: sizes[i] bytes at offsets[i] of file descriptor files[i]. out must have space
   for all. got[i]: bytes read, fewer at the end of the file, or -errno. checksums[i]: CRC-32C of the bytes read.
   One call for many pieces, so that Python's ctypes releases and reacquires the GIL once instead of n times. */
WS_API void ws_read(int n, const int32_t *files, const int64_t *offsets, const size_t *sizes, uint8_t *out, int64_t *got,
                    uint32_t *checksums);

/* Reads n regular files into out, one after another. paths: n paths, each with its NUL. room: bytes in out. sizes[i]: bytes of
   file i, or WS_OTHERWISE if it cannot be read, is no regular file or changes its size meanwhile: an ordinary read tells why.
   The files after it are not read, and have WS_OTHERWISE as well. checksums[i]: CRC-32C of the bytes.
   Stops at a file that does not fit into what is left of out. Returns n, or that file's number, and its size in sizes. */
enum { WS_OTHERWISE = -1 };
WS_API int ws_read_files(int n, const char *paths, size_t room, uint8_t *out, int64_t *sizes, uint32_t *checksums);

/* The JPEG library and the kernels in use, for example "libjpeg-turbo 2.1.5, avx2". */
WS_API const char *ws_version(void);

#endif
