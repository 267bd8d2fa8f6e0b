#include "sniff.h"

#include <string.h>

#include "worldsize.h"

enum { SOF0 = 0xC0, SOF2 = 0xC2, DHT = 0xC4, RST0 = 0xD0, RST7 = 0xD7, EOI = 0xD9, SOS = 0xDA, DQT = 0xDB, DRI = 0xDD };
enum { APP0 = 0xE0, APP2 = 0xE2, APP13 = 0xED, APP14 = 0xEE, APP15 = 0xEF, COM = 0xFE };

static int begins(const uint8_t *body, size_t size, const char *word, size_t length) {
    return size >= length && memcmp(body, word, length) == 0;
}

/* Pillow reads some application segments and gives a picture up where they are too short; libjpeg does not care. Those
   that could be a reason are left to Pillow. */
static int plain_segment(int marker, const uint8_t *body, size_t size) {
    if (marker == APP0 && begins(body, size, "JFIF", 4)) return size >= 7;
    if (marker == APP2 && begins(body, size, "ICC_PROFILE\0", 12)) return size >= 14;
    if (marker == APP2 && begins(body, size, "MPF\0", 4)) return 0; /* several pictures in one file */
    if (marker == APP13 && size >= 6) return memcmp(body + size - 6, "8BIM", 4) != 0;
    if (marker == APP14 && begins(body, size, "Adobe", 5)) return size >= 7;
    return (marker >= APP0 && marker <= APP15) || marker == COM || marker == DHT || marker == DQT || marker == DRI;
}

static int frame(const uint8_t *body, size_t size, ws_head *head) {
    if (size < 6 || head->height || body[0] != 8 || (body[5] != 1 && body[5] != 3)) return 0;
    head->height = body[1] << 8 | body[2];
    head->width = body[3] << 8 | body[4];
    return head->height > 0 && head->width > 0;
}

int ws_sniff(const uint8_t *data, size_t size, ws_head *head) {
    memset(head, 0, sizeof *head);
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8 || data[size - 2] != 0xFF || data[size - 1] != EOI) return WS_FOREIGN;
    size_t at = 2;
    while (size - at >= 4 && data[at] == 0xFF) {
        const int marker = data[at + 1];
        const size_t length = (size_t)data[at + 2] << 8 | data[at + 3];
        const uint8_t *body = data + at + 4;
        if (marker == SOS) return head->height ? WS_DONE : WS_FOREIGN;
        if (length < 2 || length > size - at - 2) return WS_FOREIGN;
        if (marker >= SOF0 && marker <= SOF2) {
            if (!frame(body, length - 2, head)) return WS_FOREIGN;
        } else if (!plain_segment(marker, body, length - 2)) {
            return WS_FOREIGN;
        }
        at += 2 + length;
    }
    return WS_FOREIGN;
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
