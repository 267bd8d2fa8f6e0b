/* Decodes one JPEG, row by row, into a resizer. */
#ifndef WS_JPEG_H
#define WS_JPEG_H

#include "workspace.h"

/* Writes the cut of this JPEG to out (format->size squared, 3 bytes a pixel). Returns a status; out is undefined unless it
   is WS_OK. */
int ws_jpeg(ws_workspace *space, const uint8_t *data, size_t size, const ws_cut *cut, int flip, const ws_format *format,
            uint8_t *out);

#endif
