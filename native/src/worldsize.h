/* Cuts of many pictures at once: JPEG bytes or raw pixels in, uint8 pixels of one size out. And reading many at once.

   Plain C ABI for ctypes. The library starts no thread, prints nothing and keeps no state but the kernels it chose when
   it was loaded, so any number of threads may call it. Each picture has its own status; a picture that cannot be done
   here has a status other than WS_DONE and black pixels, and never disturbs its neighbours. */
#ifndef WORLDSIZE_H
#define WORLDSIZE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define WS_API __attribute__((visibility("default")))
#else
#define WS_API
#endif

/* Which interface this is: one more with each change of what follows. worldsize.data.native asks for it first, since a library
   that was built before a change stays where it is until worldsize is installed again. */
enum { WS_INTERFACE = 2 };
WS_API int ws_interface(void);

enum {
    WS_DONE = 0,
    WS_FOREIGN = 1, /* not a plain JPEG of 8 bits with 1 or 3 components: another decoder must look at it */
    WS_DAMAGED = 2, /* libjpeg found an error or had a warning */
    WS_LIMIT = 3,   /* too many pixels, scans or bytes */
    WS_MISFIT = 4,  /* the cut does not lie in this picture */
    WS_MEMORY = 5   /* no memory */
};

/* One cut: the box of the picture (pixels) that is resized to rows x columns, and where in that grid the size x size
   output begins. y and x may be negative, and the output may reach beyond the grid: it is black there. */
typedef struct {
    int32_t top, left, height, width;
    int32_t rows, columns;
    int32_t y, x;
} ws_cut;

/* Heights and widths of n JPEGs, from their headers alone. Status WS_DONE: ws_decode can try this one.
   Returns how many have another status. */
WS_API int ws_headers(int n, const uint8_t *const *data, const size_t *sizes, int32_t *heights, int32_t *widths,
                      uint8_t *status);

enum {
    WS_SCALING = 1,  /* decode at 1/2 or 1/4 where the box stays at least as large as the grid */
    WS_PILLOW_13 = 2 /* columns before rows where Pillow 13 does so: where the height shrinks by more than twice what the
                        width does, in pixels. Else, and without this, rows (the pass across) come first. */
};

/* Cuts of n JPEGs into out (n x size x size x 3, RGB). flips[i] other than 0 mirrors picture i left to right.
   Returns how many have a status other than WS_DONE, or -1 where n or size is out of range (size: 1 to 16384). */
WS_API int ws_decode(int n, const uint8_t *const *data, const size_t *sizes, const ws_cut *cuts, const uint8_t *flips,
                     int32_t size, int32_t options, uint8_t *out, uint8_t *status);

/* The same from raw RGB pictures: data[i] has heights[i] x widths[i] x 3 bytes. */
WS_API int ws_raw(int n, const uint8_t *const *data, const int32_t *heights, const int32_t *widths, const ws_cut *cuts,
                  const uint8_t *flips, int32_t size, int32_t options, uint8_t *out, uint8_t *status);

/* sizes[i] bytes at offsets[i] of the open file files[i], n times, one after the other into out, which has room for all.
   got[i]: how many there were, fewer at the end of the file; or -errno. checksums[i]: CRC-32C of these. In one call, so that a
   caller who lets go of a lock meanwhile, as Python does, waits for it once and not n times. */
WS_API void ws_read(int n, const int32_t *files, const int64_t *offsets, const size_t *sizes, uint8_t *out, int64_t *got,
                    uint32_t *checksums);

/* What this library is, for example "libjpeg-turbo 2.1.5, avx2". */
WS_API const char *ws_version(void);

#endif
