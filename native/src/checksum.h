#ifndef WS_CHECKSUM_H
#define WS_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* CRC-32C (Castagnoli polynomial; RFC 3720, section 12.1). Uses the CPU's instruction on x86-64 with SSE 4.2, and on ARM if
   the compiler targets the CRC extension; otherwise plain C. */
uint32_t ws_crc32c(const uint8_t *data, size_t size);

/* The same in plain C, on every CPU. */
uint32_t ws_crc32c_plain(const uint8_t *data, size_t size);

#endif
