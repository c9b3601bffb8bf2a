"""The training command: started, watched and ended as processes, and the socket that they speak
through.
"""
