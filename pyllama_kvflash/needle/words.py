"""Word lists and prose grammar of the needle documents, written for this project.

The same words and templates produced the training text of `needle-7m`: change them and the bundled model
reads prose it was not trained on.
"""

import random
import re
from typing import Final


def _words(text: str) -> tuple[str, ...]:
    """Split `text` at white space."""
    return tuple(text.split())


def _lines(text: str) -> tuple[str, ...]:
    """Split `text` at newlines; empty lines and indents go."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


# ---- prose: slot fillers -----------------------------------------------------------------------------------

FIRST_NAMES: Final = _words(
    """
    Anna Boris Clara Daniel Edith Felix Greta Hugo Irene Jonas Karin Lukas Marta Nils Olga Pavel Quentin
    Rosa Simon Tessa Ulrich Vera Walter Xenia Yannick Zelda Arthur Beatrice Conrad Dora Emil Flora Gustav
    Helena Ivan Julia Klaus Lena Martin Nora Oscar Paula Rufus Sofia Thomas Ursula Victor Wanda Adrian
    Bianca Caspar Diana Edgar Fiona Gordon Hazel Isaac Judith Kevin Laura Magnus Nadia Otto Petra Robert
    Stella Tobias Violet Wilfred Agnes Bernard Cecilia Dominic Elsa Frank Gloria Harold Ida Joseph Kate
    Leo Miriam Norman Olivia Peter Rachel Samuel Teresa Vincent Alice Bruno Celine David Eva George Hannah
    Ingrid Jacob
    """
)
LAST_NAMES: Final = _words(
    """
    Abbott Baker Carver Dalton Ellis Fischer Garner Hale Ingram Jensen Keller Lambert Mercer Norton
    Osborne Parker Quill Ramsey Sutton Thorne Underwood Vance Whitlock Yates Zimmer Archer Barlow Chandler
    Draper Emerson Fletcher Granger Holloway Irving Jarvis Kendall Lowell Marlow Nash Oakley Porter
    Redford Sawyer Tanner Upton Vaughn Weaver York Ashford Bishop Cooper Drake Everett Foster Gibson
    Harper Jordan Knight Langley Mason Newton Palmer Quinn Reeves Shepherd Turner Walsh Wright Becker
    Crane Doyle Frost Goodwin Hooper Lindqvist Moreau Novak Olsen Petrov Rossi Silva Tanaka Varga
    """
)
PLACES: Final = _words(
    """
    Alderton Brackwater Cresthaven Dunmore Eastmarsh Fairhollow Glenrock Harrowgate Ironbridge Juniper
    Kestrelford Larkspur Millbrook Northwick Oakhurst Pinecliff Quarrytown Ravenmoor Stonefield Thornbury
    Umberton Valewood Westerly Yarrowdale Ashbourne Birchwood Coldstream Deepwell Elmstead Foxglove
    Greyport Highcastle Isleham Kingsmere Lowmarket Marshgate Newhaven Oldbury Portsend Redcliff Silverton
    Tidewater Upperton Windham Amberley Bellmont Claymoor Driftwood Eldergrove Ferncliff
    """
)
MONTHS: Final = _words(
    """
    January February March April May June July August September October November December
    """
)
DAYS: Final = _words(
    """
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
    """
)
SEASONS: Final = _words(
    """
    spring summer autumn winter
    """
)
GOODS: Final = _words(
    """
    wool salt copper timber barley honey linen pepper candles glass leather rope tin silk wheat cheese oil
    paper coal bricks apples pottery tea coffee sugar nails cloth iron marble wine herring flour soap dyes
    furs beans onions cotton cider lamps tiles
    """
)
JOBS: Final = _words(
    """
    carpenter merchant sailor teacher baker clerk miller doctor gardener painter blacksmith librarian
    judge printer tailor fisherman weaver mason shepherd innkeeper surveyor musician engineer botanist
    cook driver captain mayor porter nurse watchmaker postmaster farmer hunter potter
    """
)
ADJECTIVES: Final = _words(
    """
    small large old new quiet busy narrow broad dusty bright dark warm cold heavy light simple careful
    strange pleasant ordinary crowded empty wooden painted broken clean muddy steep gentle patient famous
    honest tired cheerful anxious modest expensive cheap useful rough smooth distant familiar ancient
    """
)
NOUNS: Final = _words(
    """
    house street bridge market river harbor garden school church mill road field tower library station
    kitchen window door table letter map basket cart boat wall roof stove clock bench fence orchard barn
    well cellar stable square workshop forest hill valley meadow path inn office
    """
)
MOODS: Final = _words(
    """
    happy tired curious worried calm pleased nervous hopeful grateful restless surprised proud hungry
    sleepy thoughtful annoyed relieved content lonely excited
    """
)
ANIMALS: Final = _words(
    """
    horse dog cat goat donkey sheep cow goose duck hen crow fox deer owl swallow heron otter rabbit mule
    ox
    """
)
VERBS: Final = _words(
    """
    walked rode hurried travelled wandered returned drove sailed climbed went
    """
)
ADVERBS: Final = _words(
    """
    slowly quickly quietly carefully happily early late alone together gladly reluctantly cheerfully
    silently
    """
)
NUMBER_WORDS: Final = _words(
    """
    two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty sixty
    ninety
    """
)
WEATHER: Final = (
    "a cold rain",
    "a light drizzle",
    "a heavy fog",
    "a warm wind",
    "a sharp frost",
    "thick snow",
    "a pale sun",
    "a sudden storm",
    "low clouds",
    "a quiet mist",
    "bright sunshine",
    "a bitter wind",
    "a gentle breeze",
    "rolling thunder",
    "a grey sky",
    "a clear sky",
    "a soft snowfall",
    "a dry heat",
)
FOOD: Final = (
    "bread and cheese",
    "a bowl of soup",
    "roasted chestnuts",
    "fresh fish",
    "a plate of beans",
    "apple pie",
    "warm milk",
    "cold ham",
    "boiled eggs",
    "a pot of stew",
    "honey cakes",
    "black tea",
    "potatoes with butter",
    "smoked herring",
    "a slice of melon",
    "porridge",
)

# ---- prose: templates --------------------------------------------------------------------------------------
# {hero} {friend} {home} {away} are drawn once a paragraph; every other slot is drawn anew each time.
TOPICS: Final = {
    "travel": _lines(
        """
        {hero} left {home} at dawn and {verb} along the {adj} road towards {away}.
        The journey from {home} to {away} took {count} days because of {weather}.
        On the way {hero} met a {job} from {place} who was carrying {goods} to the market.
        They stopped at a {adj} inn and ate {food} beside the fire.
        In the {season} the road past {away} is {adj} and few people use it.
        {friend} had drawn a {adj} map of the valley, but the {noun} was missing from it.
        By evening {weather} covered the hills and the travellers {verb} {adv}.
        The {animal} was {mood} and refused to cross the {adj} bridge.
        {hero} wrote the names of every village between {home} and {away} in a {adj} book.
        It was {day} before they saw the {noun} of {away} in the distance.
        The ferry to {away} costs {count} coins, and it leaves only when the tide is high.
        {friend} carried the heavier bag and never complained about it.
        At the border a {adj} clerk asked them for their papers and let them pass.
        They slept in a {adj} barn because the inn at {away} was full.
        """
    ),
    "trade": _lines(
        """
        {hero} bought {count} sacks of {goods} in {home} and sold them in {away}.
        The price of {goods} rose in {month} after {weather} damaged the roads.
        A merchant from {away} offered {goods} in exchange for {goods}.
        {friend} kept the accounts in a {adj} ledger and checked every line twice.
        In {month} the warehouse at {home} held {number} crates of {goods}.
        Nobody in {home} wanted {goods}, so the cart went on to {away}.
        The {job} paid {number} coins for the {adj} cart and its {animal}.
        {hero} said that {goods} from {away} was better than {goods} from {place}.
        Every {day} the traders of {home} meet at the {noun} to agree on prices.
        The tax on {goods} was lowered by {count} coins last {season}.
        {friend} borrowed {number} coins and promised to return them before {month}.
        Some of the {goods} had been spoiled by {weather}.
        A {adj} ship brought {goods} and {goods} to the harbor of {home}.
        The buyers from {away} were {mood}, and the bargaining lasted until night.
        """
    ),
    "diary": _lines(
        """
        {day}. I woke early and saw {weather} over the {noun}.
        I felt {mood} today and stayed at home with a book.
        In the morning {hero} came to visit and brought {food}.
        We talked about {friend}, who has moved to {place} to work as a {job}.
        After lunch I {verb} to the {adj} {noun} and sat there for an hour.
        My {animal} has learned to open the door of the {noun}.
        I must remember to write to {friend} before the end of {month}.
        The letter from {home} arrived {adv}, as it always does on a {day}.
        Tonight there is {weather} outside and the house is {adj}.
        I have been reading about the history of {away}, and I find it {adj}.
        {hero} laughed at my plan to sell {goods}, but I am still {mood}.
        We ate {food} for supper and went to bed early.
        I dreamed about the {adj} {noun} again and woke up {mood}.
        Tomorrow I will help {friend} to repair the {noun}.
        """
    ),
    "weather": _lines(
        """
        In {month} the people of {home} expect {weather}.
        There was {weather} over {home} on {day} morning.
        The {season} was unusual, for {weather} lasted {count} weeks.
        By noon {weather} had reached {away} and the streets were empty.
        Old sailors say that {weather} in {month} means a good harvest.
        {hero} measured the rain every {day} and recorded {number} drops in the glass.
        After {weather} the {noun} was covered with leaves.
        The {animal} always hides in the {noun} before a storm.
        It has not been so {adj} in {home} since the year {year}.
        {friend} looked at the sky and predicted {weather} for {day}.
        The river near {away} rose by {count} feet during the night.
        Nobody remembers a {season} with so much wind.
        """
    ),
    "town": _lines(
        """
        The {noun} of {home} was built in {year} by a {job} named {hero}.
        Most people in {home} know the {adj} {noun} behind the church.
        On {day} the square is full of carts selling {goods}.
        The {job} of {home} lives next to the {adj} {noun}.
        There are {number} houses in {home} and only {count} streets.
        Visitors from {away} often admire the {adj} {noun} near the river.
        {hero} repaired the roof of the {noun} without asking for money.
        The children of {home} play by the {noun} until the lamps are lit.
        A {adj} wall divides the old part of {home} from the new one.
        Last {season} the council decided to paint the {noun}.
        {friend} opened a shop that sells {goods} and {goods}.
        The bell of {home} rings {count} times at midnight.
        Every {month} there is a fair with music and {food}.
        The road to {away} begins at the {adj} gate.
        """
    ),
    "work": _lines(
        """
        {hero} worked as a {job} in {home} for {count} years.
        The workshop smelled of {goods} and warm dust.
        {friend} was a {adj} {job} who never hurried.
        A good {job} needs patience, a {adj} bench and clean tools.
        They finished the {noun} in {month}, {count} weeks later than planned.
        {hero} learned the trade from an old {job} in {away}.
        The new {noun} was {adj}, and the owner was {mood} with it.
        On {day} the workers were paid and went home {adv}.
        {friend} broke the handle and made another one from {adj} wood.
        The order from {away} asked for {number} pieces before the {season}.
        Every morning {hero} swept the floor and lit the stove.
        They shared {food} at noon and spoke about {place}.
        """
    ),
    "nature": _lines(
        """
        The forest above {home} is home to the {animal} and the {animal}.
        In {season} the meadow near {away} is covered with flowers.
        A {adj} path leads from the {noun} to the lake.
        {hero} counted {number} birds on the river in {month}.
        The {animal} moved {adv} between the trees.
        When there is {weather}, the valley becomes {adj}.
        {friend} planted an apple tree beside the {adj} {noun}.
        Nobody hunts the {animal} in the hills of {home}.
        The water of the spring is {adj} even in the {season}.
        A {animal} slept under the {noun} while the {animal} watched.
        The hill behind {away} is {adj}, and its top is often hidden by clouds.
        {hero} collected leaves and dried them between the pages of a book.
        """
    ),
    "school": _lines(
        """
        The school in {home} has {count} rooms and a {adj} garden.
        {hero} teaches geography and is {mood} with the pupils.
        On {day} the class read a story about a {animal} and a {job}.
        {friend} wrote the answer on the board and sat down {adv}.
        The library received {number} books from a {job} in {away}.
        Every pupil must bring {food} for the {season} fair.
        The lesson about {goods} was long, but nobody was {mood}.
        In {year} the old school was closed because of {weather}.
        {hero} asked why the {noun} of {away} is so {adj}.
        The examination will be held in {month} in the {adj} hall.
        {friend} drew a picture of the {noun} and gave it to the teacher.
        """
    ),
    "home": _lines(
        """
        {hero} lives in a {adj} house near the {noun} of {home}.
        The kitchen is {adj}, and there is always {food} on the table.
        {friend} painted the door in {month} and repaired the {noun}.
        The {animal} sleeps by the stove when there is {weather}.
        On {day} the family cleans the {noun} and washes the floor.
        A {adj} clock stands in the corner and is {count} minutes late.
        {hero} keeps {goods} in the cellar and {goods} in the attic.
        Guests from {away} arrived {adv} and stayed for {count} days.
        The garden gives {food} and flowers in the {season}.
        {friend} told a long story about a {job} who was never {mood}.
        They closed the windows, for {weather} was coming.
        The key to the {noun} hangs behind the {adj} door.
        """
    ),
    "sea": _lines(
        """
        The ship left the harbor of {home} with {goods} and {goods} on board.
        {hero} had been a sailor for {count} years and was never {mood} at sea.
        On the third day {weather} came from the west.
        The captain said that {away} was {count} days away.
        They caught {number} fish and ate {food} on the deck.
        {friend} repaired the sail {adv} while the others slept.
        The lighthouse of {away} can be seen from the {adj} cliffs.
        A {adj} boat followed them until {day} and then turned back.
        In {month} the sea near {home} is {adj} and full of ice.
        The crew sang songs about {place} and a {adj} {animal}.
        When they reached {away}, the harbor was {adj} and the people were {mood}.
        """
    ),
}

# ---- keys --------------------------------------------------------------------------------------------------
# A key is an adjective and a noun.  The held-out words never occurred in a key during training.

KEY_ADJECTIVES: Final = _words(
    """
    amber silver crimson golden hidden frozen silent ancient broken burning crystal distant emerald faded
    gentle hollow iron jade lonely marble misty noble orange pale purple quiet rusty scarlet secret
    shining simple sleeping smoky solid stormy striped sunken tall tiny twisted velvet violet wandering
    white wild winter wooden yellow azure black blazing blue bold brass brave bright bronze brown calm
    clever cloudy cold copper coral cosmic curious dark deep drifting dusty eager electric empty endless
    eternal famous fancy fast fearless flying foggy forgotten fragile fresh glass gleaming glowing grand
    granite green grey happy heavy honest humble hungry icy idle indigo ivory jolly keen lazy light little
    living lost loud lucky magic maroon mellow mighty modern narrow nimble northern obsidian odd old olive
    opal painted patient pearl pink plain playful polished proud quick rapid rare red restless rich
    roaming rough round royal ruby sacred sandy sapphire sharp shy smooth snowy soft southern spiral
    steady steel stone strange strong swift tame tender thirsty thunder tired topaz turquoise urban vast
    warm weary western wise woven young zealous
    """
)
KEY_NOUNS: Final = _words(
    """
    falcon harbor lantern bridge garden tower river mountain castle forest temple engine mirror compass
    anchor bell blade boat book bottle bow box branch candle canyon carpet cart cave chest circle city
    clock cloud coin column cottage crane crown dagger desert diamond dolphin door dragon drum eagle
    elephant falls feather fiddle field fig flame flower flute fountain fox gate giant glacier globe goat
    hammer harp hawk heart helmet hill horn horse house island jacket jar jewel journal key kite knight
    ladder lake lamp leopard letter library lighthouse lion lizard lock machine maple market mask meadow
    medal mill monkey moon needle nest oak ocean orchard otter owl palace panda panther parrot path
    peacock pebble pencil pepper phoenix piano pillar pilot pine planet pocket pond portal prince pyramid
    quarry queen rabbit raven ribbon ring road robin rocket rose sail salmon scroll shadow shield ship
    shore signal sparrow spear sphere spider star statue stove stream summit sword table telescope tent
    thistle throne tiger torch train treasure tree trumpet tunnel turtle valley vase vault village violin
    volcano wagon wall walnut watch wave well whale wheel whistle window wing wizard wolf workshop zebra
    """
)
HELD_OUT_ADJECTIVES: Final = _words(
    """
    amber cosmic obsidian velvet scarlet gleaming northern polished thirsty marble
    """
)
HELD_OUT_NOUNS: Final = _words(
    """
    falcon telescope walnut pyramid lantern orchard violin glacier sparrow compass
    """
)
TRAINED_ADJECTIVES: Final = tuple(word for word in KEY_ADJECTIVES if word not in HELD_OUT_ADJECTIVES)
TRAINED_NOUNS: Final = tuple(word for word in KEY_NOUNS if word not in HELD_OUT_NOUNS)


def is_held_out_pair(adjective: str, noun: str) -> bool:
    """Whether training skipped this pair of key words, as it did one pair in ten, chosen by a hash."""
    value = 0
    for byte in f"{adjective}|{noun}".encode():
        value = (value * 131 + byte) & 0xFFFFFFFF
    return (value >> 7) % 10 == 0


# ---- pseudo-words ------------------------------------------------------------------------------------------

SYLLABLES: Final = _words(
    """
    ba be bi bo bra bre da de do dra du fa fe fi flo ga ge go gra ha he ho ja je ka ke ki kra la le li lo
    ma me mi mo na ne no pa pe pi pra qua ra re ri ro sa se si so sta ta te ti to tra va ve vi vo wa we zo
    za
    """
)
CODAS: Final = _words(
    """
    l n r s m th nd rk st ck x ll ng rn sh p t v d k
    """
)


def pseudo_word(rng: random.Random) -> str:
    """Draw a pronounceable word of two or three syllables that means nothing."""
    syllables = [rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))]
    return "".join(syllables) + rng.choice(CODAS)


# ---- grammar -----------------------------------------------------------------------------------------------

_FILLERS: Final[dict[str, tuple[str, ...]]] = {
    "adj": ADJECTIVES,
    "adv": ADVERBS,
    "animal": ANIMALS,
    "count": NUMBER_WORDS,
    "day": DAYS,
    "food": FOOD,
    "goods": GOODS,
    "job": JOBS,
    "month": MONTHS,
    "mood": MOODS,
    "noun": NOUNS,
    "place": PLACES,
    "season": SEASONS,
    "verb": VERBS,
    "weather": WEATHER,
}
_NUMBERS: Final = {"number": (10, 9999), "year": (1400, 1990)}
_SLOT: Final = re.compile(r"\{(\w+)\}")
_ARTICLE: Final = re.compile(r"\b([Aa]) (?=[aeio]|honest|u(?!se))")
_NOISE_SHARE: Final = 0.03  # of all paragraphs
_FULL_NAME_SHARE: Final = 0.3  # of all heroes
_TOPIC_NAMES: Final = tuple(TOPICS)


def _sentence(template: str, rng: random.Random, cast: dict[str, str]) -> str:
    """Fill every slot of `template`, from `cast` or drawn anew; "a" becomes "an" where due."""

    def value(slot: re.Match[str]) -> str:
        name = slot[1]
        if name in cast:
            return cast[name]
        if name in _NUMBERS:
            return str(rng.randint(*_NUMBERS[name]))
        return rng.choice(_FILLERS[name])

    return _ARTICLE.sub(r"\1n ", _SLOT.sub(value, template))


def _noise(rng: random.Random) -> list[str]:
    """Draw sentences of pseudo-words, 6 to 33 words in all: recall must not depend on known prose."""
    left = rng.randint(6, 33)
    sentences = []
    while left:
        size = min(left, rng.randint(4, 9))
        sentences.append(" ".join(pseudo_word(rng) for _ in range(size)).capitalize() + ".")
        left -= size
    return sentences


def paragraph(rng: random.Random) -> list[str]:
    """Draw one paragraph: 2 to 7 sentences on one topic, with two people and two places; 3 % are noise."""
    if rng.random() < _NOISE_SHARE:
        return _noise(rng)
    templates = TOPICS[rng.choice(_TOPIC_NAMES)]
    hero, friend = rng.sample(FIRST_NAMES, 2)
    home, away = rng.sample(PLACES, 2)
    if rng.random() < _FULL_NAME_SHARE:
        hero += " " + rng.choice(LAST_NAMES)
    cast = {"hero": hero, "friend": friend, "home": home, "away": away}
    return [_sentence(template, rng, cast) for template in rng.sample(templates, rng.randint(2, 7))]
