"""What each daemon is as a process: its folders, its screen, its logs, its tasks and how it
exits.
"""
