"""Services for all rooms: errors, bytes as text, files, the cache folder, progress.

In: text, numbers, paths. Out: the same, read, checked or written. Law: nothing here depends on programs or plans.

Reading order: `_errors`, `_extras` (optional packages), `_bytes`, `_budgets` (their grammar), `_files` (dataclasses on
disk), `_cache_folder`, `_progress` (phases) and `_progress_bars` (their display), `_mechanisms` (switched off by name),
`_garbage` (Python's collector, delayed), `_worker` and `_worker_process` (code that may crash, in a separate process),
`_meeting` (the processes of one job), `_native_messages` (output of C libraries).
"""
