/* Reads the markers of a JPEG before its first scan. */
#ifndef WS_SNIFF_H
#define WS_SNIFF_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    int32_t height, width;
} ws_dimensions;

/* Returns WS_OK if all decoders interpret every marker up to the first scan in the same way, the image has 8 bits and 1 or
   3 components, and the data ends with an end-of-image marker; otherwise WS_UNSUPPORTED. */
int ws_sniff(const uint8_t *data, size_t size, ws_dimensions *dimensions);

/* Whether `data` is the rest of an entropy-coded segment followed by the end-of-image marker and nothing else. */
int ws_is_last_scan(const uint8_t *data, size_t size);

#endif
