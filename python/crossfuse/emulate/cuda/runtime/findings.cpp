#include "findings.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <unistd.h>

#include "guarantees.h"

namespace emu {

namespace {
FILE* file = nullptr;
size_t limit = 0, count = 0, faults = 0;
std::set<std::tuple<const void*, Site, Site>> known;
const bool counts_uses = getenv("CROSSFUSE_USES") != nullptr;
std::map<Site, bool> uses, news;

void write_text(const char* key, const std::string& text) {
  fprintf(file, "\"%s\": \"", key);
  for (char c : text) {
    if (c == '"' || c == '\\') fputc('\\', file);
    fputc(c, file);
  }
  fputs("\", ", file);
}
}  // namespace

void note_use(Site site, bool useful) {
  if (counts_uses) uses[site] |= useful;
}

void note_news(Site site, bool something) {
  if (counts_uses) news[site] |= something;
}

bool notes_uses() { return counts_uses; }

void write_uses() {
  const std::pair<const char*, const std::map<Site, bool>&> all[] = {{"use", uses}, {"news", news}};
  for (const auto& [kind, sites] : all) {
    for (const auto& [site, useful] : sites) {
      fprintf(file, "{\"kind\": \"%s\", \"first\": %u, \"useful\": %d}\n", kind, site, useful);
    }
  }
  if (counts_uses) {
    fprintf(file, "{\"kind\": \"guarantees\", \"sum\": %llu}\n",
            static_cast<unsigned long long>(sum_of_guarantees()));
  }
  fflush(file);
}

void note_launches(size_t at_once) {
  if (at_once < 2) return;
  fprintf(file, "{\"kind\": \"at-once\", \"launches\": %zu}\n", at_once);
  fflush(file);
}

void open_findings(const char* path, size_t most) {
  limit = most;
  file = fopen(path, "w");
  if (!file) {
    perror(path);
    exit(3);
  }
}

size_t findings_count() { return count; }
size_t faults_count() { return faults; }

bool is_news(const char* kind, Site first, Site second) {
  if (count >= limit) return false;
  return known.insert({kind, first, second}).second;
}

void report(const Finding& finding) {
  if (count >= limit) return;
  ++count;
  faults += strcmp(finding.kind, "barrier-statement") != 0;
  fputc('{', file);
  write_text("kind", finding.kind);
  write_text("shared", finding.place.shared);
  write_text("detail", finding.detail);
  fprintf(file,
          "\"argument\": %d, \"offset\": %ld, \"in_shared\": %d, \"first\": %u, \"second\": %u, \"cta\": %d, "
          "\"thread\": %d}\n",
          finding.place.argument, finding.place.offset, finding.place.in_shared, finding.first & ~kAtomic,
          finding.second & ~kAtomic, finding.cta, finding.thread);
  fflush(file);
}

void stop() {
  fputs("{\"kind\": \"stopped\"}\n", file);
  fflush(file);
  _exit(0);
}

std::string format(const char* text, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(line, sizeof line, text, arguments);
  va_end(arguments);
  return line;
}

int current_cta() { return device.current ? static_cast<int>(device.current->cta->linear) : -1; }
int current_thread() {
  return device.current ? static_cast<int>(device.current->index()) : -1;
}

std::string who(const Access& access) {
  const Started& start = start_of(access);
  const CrossfuseIndex &grid = start.grid->launch.grid, &size = start.grid->launch.cluster;
  const uint32_t linear = start.linear;
  unsigned clusters_x = grid.x / size.x, clusters_y = grid.y / size.y, rank = access.rank();
  unsigned x = linear % clusters_x * size.x + rank % size.x;
  unsigned y = linear / clusters_x % clusters_y * size.y + rank / size.x % size.y;
  unsigned z = linear / clusters_x / clusters_y * size.z + rank / size.x / size.y;
  return format("CTA %u thread %u", x + grid.x * (y + grid.y * z), access.index());
}

}  // namespace emu
