#ifndef WS_CHECKSUM_H
#define WS_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* CRC-32C (Castagnoli's polynomial; RFC 3720, section 12.1), with an instruction for it where x86-64 has one, or the compiler was told that an
   ARM has one. */
uint32_t ws_crc32c(const uint8_t *data, size_t size);

/* The same in plain C. */
uint32_t ws_crc32c_plain(const uint8_t *data, size_t size);

#endif
