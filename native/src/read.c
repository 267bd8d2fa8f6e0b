#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
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

/* The content of an open file, if it is a regular file that ends where its size says. Returns its size, also if that is more
   than `room` and nothing was read; WS_OTHERWISE for other files. */
static int64_t read_content(int file, size_t room, uint8_t *out) {
    struct stat status;
    uint8_t beyond;
    if (fstat(file, &status) || !S_ISREG(status.st_mode)) return WS_OTHERWISE;
    if ((uint64_t)status.st_size > room) return status.st_size;
    if (read_piece(file, 0, (size_t)status.st_size, out) != status.st_size) return WS_OTHERWISE;
    return read_piece(file, status.st_size, 1, &beyond) == 0 ? (int64_t)status.st_size : WS_OTHERWISE;
}

int ws_read_files(int n, const char *paths, size_t room, uint8_t *out, int64_t *sizes, uint32_t *checksums) {
    for (int i = 0; i < n; i++) {
        /* Without O_NONBLOCK, opening a FIFO blocks until there is a writer. */
        const int file = open(paths, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
        sizes[i] = file < 0 ? WS_OTHERWISE : read_content(file, room, out);
        if (file >= 0) close(file);
        if (sizes[i] == WS_OTHERWISE) {
            /* The others too: if the storage does not answer, each would take as long as this one to fail. */
            while (++i < n) sizes[i] = WS_OTHERWISE;
            return n;
        }
        const size_t size = (size_t)sizes[i];
        if (size > room) return i;
        checksums[i] = ws_crc32c(out, size);
        out += size;
        room -= size;
        paths += strlen(paths) + 1;
    }
    return n;
}
