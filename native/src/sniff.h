/* What a JPEG says of itself before its first scan. */
#ifndef WS_SNIFF_H
#define WS_SNIFF_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    int32_t height, width;
} ws_head;

/* WS_DONE where every marker up to the first scan is one that all decoders read alike, the picture has 8 bits and 1 or 3
   components, and the data ends with an end-of-image marker; otherwise WS_FOREIGN. */
int ws_sniff(const uint8_t *data, size_t size, ws_head *head);

/* Whether `data` is the rest of an entropy-coded segment, to the end-of-image marker that is its end. */
int ws_is_last_scan(const uint8_t *data, size_t size);

#endif
