"""What `edge-run bench` does: plain decoding against speculative decoding, over prompts or a recording.

`conversations` and `recordings` read what is asked, `measure` runs it, `account` turns the runs into numbers; `show`
and `report` present them.
"""
