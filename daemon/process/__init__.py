"""What each daemon is as a process: its folders, screen, logs, tasks and exit codes."""
