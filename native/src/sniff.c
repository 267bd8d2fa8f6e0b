#include "sniff.h"

#include <string.h>

#include "worldsize.h"

enum { SOF0 = 0xC0, SOF2 = 0xC2, DHT = 0xC4, RST0 = 0xD0, RST7 = 0xD7, EOI = 0xD9, SOS = 0xDA, DQT = 0xDB, DRI = 0xDD };
enum { APP0 = 0xE0, APP2 = 0xE2, APP13 = 0xED, APP14 = 0xEE, APP15 = 0xEF, COM = 0xFE };

static int starts_with(const uint8_t *body, size_t size, const char *prefix, size_t length) {
    return size >= length && memcmp(body, prefix, length) == 0;
}

/* Pillow parses some application segments and rejects the image if they are too short; libjpeg ignores them. Images with a
   segment that Pillow could reject are left to Pillow. */
static int is_harmless_segment(int marker, const uint8_t *body, size_t size) {
    if (marker == APP0 && starts_with(body, size, "JFIF", 4)) return size >= 7;
    if (marker == APP2 && starts_with(body, size, "ICC_PROFILE\0", 12)) return size >= 14;
    if (marker == APP2 && starts_with(body, size, "MPF\0", 4)) return 0; /* several images in one file */
    if (marker == APP13 && size >= 6) return memcmp(body + size - 6, "8BIM", 4) != 0;
    if (marker == APP14 && starts_with(body, size, "Adobe", 5)) return size >= 7;
    return (marker >= APP0 && marker <= APP15) || marker == COM || marker == DHT || marker == DQT || marker == DRI;
}

static int read_frame(const uint8_t *body, size_t size, ws_dimensions *dimensions) {
    if (size < 6 || dimensions->height || body[0] != 8 || (body[5] != 1 && body[5] != 3)) return 0;
    dimensions->height = body[1] << 8 | body[2];
    dimensions->width = body[3] << 8 | body[4];
    return dimensions->height > 0 && dimensions->width > 0;
}

int ws_sniff(const uint8_t *data, size_t size, ws_dimensions *dimensions) {
    memset(dimensions, 0, sizeof *dimensions);
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return WS_UNSUPPORTED;
    if (data[size - 2] != 0xFF || data[size - 1] != EOI) return WS_UNSUPPORTED;
    size_t at = 2;
    while (size - at >= 4 && data[at] == 0xFF) {
        const int marker = data[at + 1];
        const size_t length = (size_t)data[at + 2] << 8 | data[at + 3];
        const uint8_t *body = data + at + 4;
        if (marker == SOS) return dimensions->height ? WS_OK : WS_UNSUPPORTED;
        if (length < 2 || length > size - at - 2) return WS_UNSUPPORTED;
        if (marker >= SOF0 && marker <= SOF2) {
            if (!read_frame(body, length - 2, dimensions)) return WS_UNSUPPORTED;
        } else if (!is_harmless_segment(marker, body, length - 2)) {
            return WS_UNSUPPORTED;
        }
        at += 2 + length;
    }
    return WS_UNSUPPORTED;
}

int ws_is_last_scan(const uint8_t *data, size_t size) {
    const uint8_t *const end = data + size;
    while (data < end) {
        data = memchr(data, 0xFF, (size_t)(end - data));
        if (!data || end - data < 2) return 0;
        if (data[1] == EOI) return end - data == 2;
        if (data[1] != 0 && (data[1] < RST0 || data[1] > RST7)) return 0;
        data += 2;
    }
    return 0;
}
