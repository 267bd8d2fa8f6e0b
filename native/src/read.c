#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <sys/types.h>
#include <unistd.h>

#include "checksum.h"
#include "worldsize.h"

static int64_t read_piece(int file, int64_t offset, size_t size, uint8_t *out) {
    size_t done = 0;
    while (done < size) {
        /* One call returns at most 2 GB, on some file systems less. */
        const ssize_t got = pread(file, out + done, size - done, (off_t)(offset + (int64_t)done));
        if (got == 0) break;
        if (got > 0)
            done += (size_t)got;
        else if (errno != EINTR)
            return -errno;
    }
    return (int64_t)done;
}

void ws_read(int n, const int32_t *files, const int64_t *offsets, const size_t *sizes, uint8_t *out, int64_t *got,
             uint32_t *checksums) {
    for (int i = 0; i < n; i++) {
        got[i] = read_piece(files[i], offsets[i], sizes[i], out);
        checksums[i] = got[i] > 0 ? ws_crc32c(out, (size_t)got[i]) : 0;
        out += sizes[i];
    }
}
