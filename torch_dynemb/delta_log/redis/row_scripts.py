"""Lua scripts that change one hash: each as a whole, and only for the writer that has it.

A hash has the field ``writer``: ``EPOCH UUID CHANGE``. A later writer has a higher epoch, and takes
each hash once; every change of a hash counts. So a program that was paused while another one took
over changes nothing, and a node that has lost changes gets none that follow them. ``KEYS[1]`` is
the hash and ``KEYS[2]``, of its slot, has the rows of a commit that is not applied yet. Scripts
return None, or why they changed nothing.
"""

from __future__ import annotations

# writer without its count, least count, most count
_GUARD = """
local found = redis.call('HGET', KEYS[1], 'writer') or ''
local begin = ARGV[1] .. ' '
local count = string.sub(found, 1, #begin) == begin and tonumber(string.sub(found, #begin + 1))
if not count or count < tonumber(ARGV[2]) or count > tonumber(ARGV[3]) then return found end
redis.call('HSET', KEYS[1], 'writer', begin .. string.format('%d', ARGV[3] + 1))
"""

# a call has at most 8,000 values
_MANY = """
local function many(command, key, values, first)
  for i = first, #values, 4000 do
    redis.call(command, key, unpack(values, i, math.min(i + 3999, #values)))
  end
end
"""

# least epoch, uuid, expected writer or empty: returns the writer, or an empty text
LOCK = """
local found = redis.call('HGET', KEYS[1], 'writer') or '0'
if ARGV[3] ~= '' and string.sub(found, 1, #ARGV[3]) ~= ARGV[3] then return '' end
local epoch = math.max(tonumber(string.match(found, '^%d+')) + 1, tonumber(ARGV[1]))
local writer = string.format('%d', epoch) .. ' ' .. ARGV[2]
redis.call('HSET', KEYS[1], 'writer', writer .. ' 0', 'version', 2)
return writer
"""

# writer, its epoch, 'keep', 'clear' or 'drop': returns {later writer or empty, position or empty}
TAKE = """
local found = redis.call('HGET', KEYS[1], 'writer') or '0'
local is_own = string.sub(found, 1, #ARGV[1] + 1) == ARGV[1] .. ' '
if not is_own and tonumber(string.match(found, '^%d+')) >= tonumber(ARGV[2]) then
  return {found, ''}
end
redis.call('UNLINK', KEYS[2])
if ARGV[3] ~= 'keep' then redis.call('UNLINK', KEYS[1]) end
if ARGV[3] ~= 'drop' then redis.call('HSET', KEYS[1], 'writer', ARGV[1] .. ' 0') end
return {'', redis.call('HGET', KEYS[1], 'position') or ''}
"""

# ..., fields and values
PUT = _MANY + _GUARD + "many('HSET', KEYS[1], ARGV, 4)"

# ..., '1' for the first values of a commit, ids and values; an empty value removes the id
STAGE = (
    _MANY
    + _GUARD
    + """
if ARGV[4] == '1' then redis.call('UNLINK', KEYS[2]) end
many('HSET', KEYS[2], ARGV, 5)
"""
)

# ..., position before, position after, '1' if rows are staged
ADVANCE = (
    _MANY
    + _GUARD
    + """
local position = redis.call('HGET', KEYS[1], 'position') or ''
if position ~= ARGV[5] then
  if position ~= ARGV[4] then return 'position ' .. position end
  local staged = ARGV[6] == '1' and redis.call('HGETALL', KEYS[2]) or {}
  local rows, removed = {}, {}
  for i = 1, #staged, 2 do
    if staged[i + 1] == '' then
      removed[#removed + 1] = staged[i]
    else
      rows[#rows + 1] = staged[i]
      rows[#rows + 1] = staged[i + 1]
    end
  end
  many('HSET', KEYS[1], rows, 1)
  many('HDEL', KEYS[1], removed, 1)
  redis.call('HSET', KEYS[1], 'position', ARGV[5])
end
redis.call('UNLINK', KEYS[2])
"""
)

__all__ = ["ADVANCE", "LOCK", "PUT", "STAGE", "TAKE"]
