// Collects what is wrong, each pair of statements once.
#pragma once
#include <cstddef>
#include <string>

#include "state.h"

namespace emu {

// A buffer of the job, a shared array ("" is the dynamic one), or nothing known.
struct Place {
  int argument = -1;
  std::string shared;
  long offset = -1;  // in bytes from the start of that buffer
  bool in_shared = false;
};

struct Finding {
  const char* kind;
  Place place;
  Site first = kNoSite, second = kNoSite;
  int cta = -1, thread = -1;
  std::string detail;
};

// True if this (kind, first, second) was not reported before: build the text only then.
bool is_news(const char* kind, Site first, Site second);
void report(const Finding& finding);
size_t findings_count();
// Of those, what is wrong for sure: whether barriers at two places are two statements, only whoever
// reads the report can tell.
size_t faults_count();
// Ends the process with exit status 0; the findings so far are on disk.
[[noreturn]] void stop();
// Whether a statement that synchronises has had something to do: asked for by the environment, to tell
// mutants of such a statement that are no fault.
void note_use(Site site, bool useful);
// Whether who waits for an arrival learns anything from it.
void note_news(Site site, bool news);
bool notes_uses();
void write_uses();
// How many launches ran at the same time at most.
void note_launches(size_t at_once);
void open_findings(const char* path, size_t limit);

std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
int current_cta();
int current_thread();
// "CTA 3 thread 17" of an access of the running launch.
std::string who(const Access& access);

}  // namespace emu
