/* Batch image decoding: JPEG bytes or raw pixels in, uint8 pixels of one size out. Also batch reading of files.

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

/* Version of this interface; increase it with every change below. worldsize.data.native checks it first, because a library
   built from older sources stays in place until worldsize is installed again. */
enum { WS_INTERFACE = 2 };
WS_API int ws_interface(void);

enum {
    WS_OK = 0,
    WS_UNSUPPORTED = 1, /* not a plain 8-bit JPEG with 1 or 3 components: use another decoder */
    WS_DAMAGED = 2,     /* libjpeg reported an error or a warning */
    WS_LIMIT = 3,       /* too many pixels, scans or bytes */
    WS_INVALID_CUT = 4, /* the cut lies outside the image */
    WS_NO_MEMORY = 5
};

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
    WS_PILLOW_13 = 2 /* vertical pass first where Pillow 13 does so: if the height shrinks by more than twice as many
                        pixels as the width. Otherwise, the horizontal pass comes first. */
};

/* Decodes n JPEGs and writes their cuts to out (n x size x size x 3, RGB). A nonzero flips[i] mirrors image i left to right.
   Returns the number of images with a status other than WS_OK, or -1 if n or size is out of range (size: 1 to 16384). */
WS_API int ws_decode(int n, const uint8_t *const *data, const size_t *sizes, const ws_cut *cuts, const uint8_t *flips,
                     int32_t size, int32_t options, uint8_t *out, uint8_t *status);

/* The same for raw RGB images: data[i] has heights[i] x widths[i] x 3 bytes. */
WS_API int ws_raw(int n, const uint8_t *const *data, const int32_t *heights, const int32_t *widths, const ws_cut *cuts,
                  const uint8_t *flips, int32_t size, int32_t options, uint8_t *out, uint8_t *status);

/* Reads n pieces into out, one after another: sizes[i] bytes at offsets[i] of file descriptor files[i]. out must have space
   for all. got[i]: bytes read, fewer at the end of the file, or -errno. checksums[i]: CRC-32C of the bytes read.
   One call for many pieces, so that Python's ctypes releases and reacquires the GIL once instead of n times. */
WS_API void ws_read(int n, const int32_t *files, const int64_t *offsets, const size_t *sizes, uint8_t *out, int64_t *got,
                    uint32_t *checksums);

/* The JPEG library and the kernels in use, for example "libjpeg-turbo 2.1.5, avx2". */
WS_API const char *ws_version(void);

#endif
