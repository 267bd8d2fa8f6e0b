/* Files are read into exactly the room that they need; with less room, reading stops and tells how much is missing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../src/checksum.h"
#include "../src/worldsize.h"

enum { FILES = 4 };

static const size_t lengths[FILES] = {3, 0, 70000, 1};

static uint8_t byte_of(int file, size_t i) { return (uint8_t)(i * 31 + (size_t)file); }

static int failed(const char *what) {
    fprintf(stderr, "test_read: wrong %s\n", what);
    return 1;
}

static int compare(const uint8_t *out, const int64_t *sizes, const uint32_t *checksums) {
    for (int file = 0; file < FILES; file++) {
        if (sizes[file] != (int64_t)lengths[file]) return failed("size");
        if (checksums[file] != ws_crc32c(out, lengths[file])) return failed("checksum");
        for (size_t i = 0; i < lengths[file]; i++)
            if (*out++ != byte_of(file, i)) return failed("content");
    }
    return 0;
}

static int check(const char *paths) {
    const size_t room = 3 + 70000 + 1;
    uint8_t *out = malloc(room);
    int64_t sizes[FILES];
    uint32_t checksums[FILES];
    if (!out || ws_read_files(FILES, paths, room, out, sizes, checksums) != FILES) return failed("number of files");
    int status = compare(out, sizes, checksums);
    free(out);
    out = malloc(room - 2);
    if (!out || ws_read_files(FILES, paths, room - 2, out, sizes, checksums) != 2 || sizes[2] != 70000)
        status = failed("stop at a file without room");
    free(out);
    return status;
}

int main(void) {
    char folder[] = "/tmp/test_read.XXXXXX", paths[FILES * 64], *path = paths;
    if (!mkdtemp(folder)) return failed("folder");
    for (int file = 0; file < FILES; file++) {
        sprintf(path, "%s/%d", folder, file);
        FILE *const to = fopen(path, "wb");
        for (size_t i = 0; to && i < lengths[file]; i++) putc(byte_of(file, i), to);
        if (!to || fclose(to)) return failed("file to write");
        path += strlen(path) + 1;
    }
    const int status = check(paths);
    for (const char *name = paths; name < path; name += strlen(name) + 1) remove(name);
    rmdir(folder);
    if (!status) puts("test_read: files are read into their room");
    return status;
}
