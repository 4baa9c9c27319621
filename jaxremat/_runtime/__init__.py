"""Services for all rooms: errors, bytes as text, files, the cache folder, progress.

In: text, numbers, paths. Out: the same, read, checked or written. Law: nothing here knows of programs or plans.

Reading order: `_errors`, `_extras` (optional packages), `_bytes`, `_budgets` (their grammar), `_files` (dataclasses on
disk), `_cache_folder`, `_progress` (phases) and `_progress_bars` (the same, drawn), `_mechanisms` (what can be switched
off by name), `_garbage` (Python's collector, put off), `_worker` and `_worker_process` (what may crash, in a process of
its own), `_meeting` (the processes of one job), `_native_messages` (what libraries in C print).
"""
