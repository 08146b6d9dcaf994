"""Flower as the post between the hub and the sites: the very parcels of the air gap, carried by a network.

A call goes down to a site's node and a reply comes up; a parcel travels in either as plain bytes. Signatures, the
site's policy, receipts and resuming are those of `SiteDesk` and `Hub`, which do not know that Flower is there.
"""
