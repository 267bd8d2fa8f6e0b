#include "jpeg.h"

#include <setjmp.h>
#include <stdio.h>

#include <jerror.h>
#include <jpeglib.h>

#include "sniff.h"

/* Before 2.0.0, skipping rows of a progressive 4:2:0 image could loop forever. Before 2.0.3, the chroma of 4:4:0 was
   upsampled differently from Pillow's copy of the library. */
#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "worldsize requires the headers of libjpeg-turbo 2.1 or later"
#endif

/* libjpeg-turbo can be built with the ABI of libjpeg 6 (Debian), 7 or 8 (Ubuntu). */
#if JPEG_LIB_VERSION >= 70
#define BLOCK_WIDTH min_DCT_h_scaled_size
#else
#define BLOCK_WIDTH min_DCT_scaled_size
#endif

#define MAX_SCANS 500
#define MAX_MEMORY (1L << 29) /* bytes; only the coefficients of progressive images need much */

typedef struct {
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf leave;
    int status;
    struct jpeg_decompress_struct jpeg;
} decoder;

static void give_up(j_common_ptr jpeg, int status) {
    decoder *d = jpeg->client_data;
    d->status = status;
    longjmp(d->leave, 1);
}

static int status_of(int error) {
    switch (error) {
    case JERR_OUT_OF_MEMORY: return WS_NO_MEMORY;
    case JERR_NO_BACKING_STORE: return WS_LIMIT; /* more than MAX_MEMORY */
    default: return WS_DAMAGED;
    }
}

static void on_error(j_common_ptr jpeg) { give_up(jpeg, status_of(jpeg->err->msg_code)); }

static void on_message(j_common_ptr jpeg, int level) {
    if (level < 0) give_up(jpeg, WS_DAMAGED);
}

static void on_progress(j_common_ptr jpeg) {
    if (((j_decompress_ptr)jpeg)->input_scan_number > MAX_SCANS) give_up(jpeg, WS_LIMIT);
}

static void discard_message(j_common_ptr jpeg) { (void)jpeg; }

static void prepare(decoder *d, const uint8_t *data, size_t size) {
    d->jpeg.client_data = d;
    d->jpeg.err = jpeg_std_error(&d->errors);
    d->errors.error_exit = on_error;
    d->errors.emit_message = on_message;
    d->errors.output_message = discard_message;
    jpeg_create_decompress(&d->jpeg);
    d->progress.progress_monitor = on_progress;
    d->jpeg.progress = &d->progress;
    d->jpeg.mem->max_memory_to_use = MAX_MEMORY;
    jpeg_mem_src(&d->jpeg, data, (unsigned long)size);
}

/* Returns 4, 2 or 1, the only scales for which libjpeg-turbo has SIMD code. The scaled box stays at least as large as the
   grid. */
static int32_t scale_of(const ws_cut *cut) {
    for (int32_t scale = 4; scale > 1; scale /= 2)
        if (cut->height / scale >= cut->rows && cut->width / scale >= cut->columns) return scale;
    return 1;
}

/* Restricts decoding to the needed columns. Returns the position of the first of them in a decoded row. Includes one extra
   block on each side: smooth chroma upsampling reads neighbors, so the pixels equal those of the full image. */
static JDIMENSION crop_columns(j_decompress_ptr jpeg, JDIMENSION left, JDIMENSION width) {
    const JDIMENSION block = (JDIMENSION)(jpeg->max_h_samp_factor * jpeg->BLOCK_WIDTH);
    JDIMENSION from = left / block * block;
    JDIMENSION to = (left + width + block - 1) / block * block + block;
    from = from > block ? from - block : 0;
    if (to > jpeg->output_width) to = jpeg->output_width;
    JDIMENSION columns = to - from;
    if (columns < jpeg->output_width) jpeg_crop_scanline(jpeg, &from, &columns);
    return left - from;
}

/* Whether the remaining data, which is never decoded, is valid. Without this check, whether an image counts as damaged
   would depend on the box. */
static int ends_correctly(const struct jpeg_decompress_struct *jpeg) {
    const struct jpeg_source_mgr *source = jpeg->src;
    const int marker = jpeg->unread_marker; /* the bit reader reads ahead and may have met one */
    if (marker == JPEG_EOI || jpeg_input_complete((j_decompress_ptr)jpeg)) return source->bytes_in_buffer == 0;
    if (marker != 0 && (marker < JPEG_RST0 || marker > JPEG_RST0 + 7)) return 0;
    return ws_is_last_scan(source->next_input_byte, source->bytes_in_buffer);
}

/* If scans of a progressive image are missing, libjpeg smooths between blocks and needs neighbors outside the box. */
static int has_all_scans(const struct jpeg_decompress_struct *jpeg) {
    if (!jpeg->progressive_mode) return 1;
    for (int component = 0; component < jpeg->num_components; component++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (jpeg->coef_bits[component][k] != 0) return 0;
    return 1;
}

static void read_rows(ws_workspace *space, j_decompress_ptr jpeg) {
    ws_resizer *resizer = &space->resizer;
    const JDIMENSION offset = crop_columns(jpeg, (JDIMENSION)resizer->left, (JDIMENSION)resizer->width);
    uint8_t *rows[2];
    if (!ws_workspace_rows(space, 4 * (int64_t)jpeg->output_width, rows)) give_up((j_common_ptr)jpeg, WS_NO_MEMORY);
    const JDIMENSION top = (JDIMENSION)resizer->top;
    if (top > 0 && jpeg_skip_scanlines(jpeg, top) != top) give_up((j_common_ptr)jpeg, WS_DAMAGED);
    for (int32_t remaining = resizer->height; remaining > 0;) {
        const JDIMENSION wanted = remaining > 1 ? 2 : 1;
        JDIMENSION got = 0;
        while (got < wanted) {
            const JDIMENSION more = jpeg_read_scanlines(jpeg, rows + got, wanted - got);
            if (more == 0) give_up((j_common_ptr)jpeg, WS_DAMAGED);
            got += more;
        }
        ws_put(resizer, rows[0] + 4 * (size_t)offset, wanted == 2 ? rows[1] + 4 * (size_t)offset : NULL);
        remaining -= (int32_t)wanted;
    }
}

static void decode(ws_workspace *space, decoder *d, const ws_cut *cut, int flip, const ws_format *format, uint8_t *out) {
    j_decompress_ptr jpeg = &d->jpeg;
    jpeg_read_header(jpeg, TRUE);
    const int valid = ws_check(cut, (int32_t)jpeg->image_height, (int32_t)jpeg->image_width);
    if (valid != WS_OK) give_up((j_common_ptr)jpeg, valid);
    const int32_t scale = format->options & WS_SCALING ? scale_of(cut) : 1;
    const int started = ws_begin(&space->resizer, cut, scale, flip, format, out);
    if (started != WS_OK) give_up((j_common_ptr)jpeg, started);
    jpeg->scale_num = 1;
    jpeg->scale_denom = (unsigned)scale;
    jpeg->out_color_space = JCS_EXT_RGBX;
    jpeg_start_decompress(jpeg);
    if (!has_all_scans(jpeg)) give_up((j_common_ptr)jpeg, WS_DAMAGED);
    if (space->resizer.height > 0) read_rows(space, jpeg);
    if (!ends_correctly(jpeg)) give_up((j_common_ptr)jpeg, WS_DAMAGED);
}

/* The caller owns the decoder: after longjmp, locals that the function calling setjmp has modified are undefined. */
static void try_to_decode(ws_workspace *space, decoder *d, const uint8_t *data, size_t size, const ws_cut *cut, int flip,
                          const ws_format *format, uint8_t *out) {
    if (setjmp(d->leave) != 0) return;
    prepare(d, data, size);
    decode(space, d, cut, flip, format, out);
}

int ws_jpeg(ws_workspace *space, const uint8_t *data, size_t size, const ws_cut *cut, int flip, const ws_format *format,
            uint8_t *out) {
    ws_dimensions dimensions;
    if (ws_sniff(data, size, &dimensions) != WS_OK) return WS_UNSUPPORTED;
    decoder d = {.status = WS_OK};
    try_to_decode(space, &d, data, size, cut, flip, format, out);
    jpeg_destroy_decompress(&d.jpeg);
    return d.status;
}
