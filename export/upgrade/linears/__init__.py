"""Storing the linears of an upgraded graph in few bits."""
