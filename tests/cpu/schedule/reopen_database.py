"""Run as a program: reads a database with nothing but TVM imported, and writes what it finds."""

import sys

import tvm
from tvm.s_tir import meta_schedule as ms


def main(directory: str, output: str) -> None:
    database = ms.database.JSONDatabase(work_dir=directory)
    target = tvm.target.Target("llvm")
    scripts = []
    for record in database.get_all_tuning_records():
        schedule = database.query_schedule(record.workload.mod, target, "main")
        scripts.append(tvm.ir.save_json(schedule.mod))
        schedule.verify_cluster()
    assert "crossfuse.lower.pipeline" not in sys.modules
    with open(output, "w", encoding="utf-8") as file:
        file.write("\n".join(text.replace("\n", "") for text in scripts))


if __name__ == "__main__":
    main(*sys.argv[1:])
