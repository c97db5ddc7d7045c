"""A text to measure perplexity on: plain prose of ours, so that no model knows it by heart."""

TEXT = """\
The ferry left the harbour a little after six, when the lamps along the quay were still burning. There were not many
passengers: two women with bicycles, a man who carried a cello in a grey case, and a group of students who slept on
their rucksacks before the ship had passed the breakwater. The captain had made this crossing for thirty years and
no longer looked at the chart. He watched the birds instead. When the gulls stayed low over the water he slowed
down, because that meant fog beyond the headland, and in all those years the gulls had been wrong only once.

On the island the baker had lit the oven at four. She mixed the dough by hand, as her father had done, and let it
rise twice, once in the bowl and once on the board. The first loaves were for the ferry. People who had been on the
water for two hours wanted something warm, and they paid without asking the price. The second batch was for the
school, where eleven children were taught in one room by a teacher who also repaired radios. The third batch she
kept for herself and for whoever came in the afternoon to talk about the weather.

It is easy to think that such a place does not change. In fact it changes all the time, only slowly. The well behind
the church dried up in the summer of the great heat, and a pipe was laid from the spring on the hill. The post
office closed, and letters now come with the bread. When the lighthouse was given a machine in place of a keeper,
the keeper stayed in his house and went on climbing the stairs each evening, first to look after the machine, then
to look after the view. Asked why, he said that a light which nobody watches is only a lamp.

Engineers came one spring to measure the wind. They put up a mast with small cups that turned, and a box that
counted the turns. For a year the box counted. The children learned to read its numbers and wrote them on the
blackboard: so many turns on Monday, so many on Tuesday, and on the day of the storm so many that the chalk broke.
When the year was over the engineers took the mast away and said that they would write. A letter did arrive, in
winter, between two loaves of rye. It said that the wind was good, but that the cable to the mainland would cost
more than the wind could pay for. The teacher read it aloud, and nobody was surprised. They had known for a long
time that the wind was good.
"""
