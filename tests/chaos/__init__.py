"""Programs that are killed, stopped, robbed of their disk and their files, and must end as if nothing had happened.

`make chaos` runs this for an hour. A round takes one program, disturbs it some times at random moments, then lets it
come to its end and compares what it left, bit for bit, with what an undisturbed run leaves. One number, the seed,
decides which troubles come and when; how far the program is then depends on the machine.
"""
